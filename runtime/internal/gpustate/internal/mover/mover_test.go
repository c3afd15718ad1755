// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package mover

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
)

// The spans of an area are its bytes, in order: from several files, of zeros where its digests tell so, and where no
// file has any.
func TestSpans(t *testing.T) {
	const offset, block = 4096, images.BlockBytes
	dir := t.TempDir()
	one, two := filepath.Join(dir, "one"), filepath.Join(dir, "two")
	for path, size := range map[string]int64{one: offset + 2*block, two: block} {
		if err := os.WriteFile(path, []byte(filepath.Base(path)), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(path, size); err != nil {
			t.Fatal(err)
		}
	}
	a := images.Area{
		Start: 1 << 40, Bytes: 4*block + 4096, Offset: offset,
		Digests: []string{"a", images.DigestBlock(make([]byte, block)), "c", "d", "e"},
		Location: images.Location{
			{Path: one, Bytes: offset + 2*block},
			{Path: two, Offset: offset + 2*block, Bytes: block},
		},
	}
	if !images.IsZeroBlock(a.Digests[1]) {
		t.Fatal("the digest is not that of zeros")
	}
	spans, err := spansOf(&a)
	if err != nil {
		t.Fatal(err)
	}
	want := []struct {
		file          string
		offset, bytes uint64
	}{
		{one, offset, block}, {"", 0, block}, {two, 0, block}, {"", 0, block + 4096},
	}
	if len(spans) != len(want) {
		t.Fatalf("spans: %+v", spans)
	}
	for i, s := range spans {
		if s.Offset != want[i].offset || s.Bytes != want[i].bytes || (s.File == nil) != (want[i].file == "") || s.File != nil && s.File.Name() != want[i].file {
			t.Errorf("span %d is %+v, want %+v", i, s, want[i])
		}
	}
	text, err := io.ReadAll(io.NewSectionReader(spans[2].File, 0, 3))
	if err != nil || !bytes.Equal(text, []byte("two")) {
		t.Errorf("the file has %q: %v", text, err)
	}
}

// What a checkpoint of others may have in the place of a file ends in an error.
func TestFilesThatAreNone(t *testing.T) {
	dir := t.TempDir()
	fifo, link := filepath.Join(dir, "fifo"), filepath.Join(dir, "link")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/dev/zero", link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{fifo, link, filepath.Join(dir, "missing"), dir} {
		a := images.Area{Bytes: 4096, Location: images.Location{{Path: path, Bytes: 4096}}}
		if spans, err := spansOf(&a); err == nil {
			t.Errorf("%s: %+v", path, spans)
		}
	}
}

// A mover that comes up early is taken once, and ends if it is not: when it has waited for long enough, or is given up.
func TestWarm(t *testing.T) {
	none := errors.New("no mover")
	// begin returns a mover that is never up, and what is closed when it was told to end.
	begin := func(wait time.Duration) (*Warm, chan struct{}) {
		ended := make(chan struct{})
		return warmFor(t.Context(), wait, func(ctx context.Context) (*cuda.Mover, error) {
			<-ctx.Done()
			close(ended)
			return nil, none
		}), ended
	}
	within := func(ended chan struct{}) {
		t.Helper()
		select {
		case <-ended:
		case <-time.After(time.Minute):
			t.Fatal("it has not ended")
		}
	}

	w, ended := begin(time.Hour)
	mover := w.take()
	if mover == nil || w.take() != nil {
		t.Fatal("it can be taken never, or twice")
	}
	w.Close()
	select {
	case <-ended:
		t.Fatal("it has ended though it was taken")
	case <-time.After(50 * time.Millisecond):
	}
	w.stop()
	if _, err := mover(); !errors.Is(err, none) {
		t.Errorf("the mover: %v", err)
	}

	w, ended = begin(time.Hour)
	w.Close()
	within(ended)
	w.Close()
	if w.take() != nil {
		t.Error("it can be taken though it was given up")
	}

	w, ended = begin(time.Millisecond)
	within(ended)
	if w.take() != nil {
		t.Error("it can be taken though it has waited for long enough")
	}

	var nobody *Warm
	nobody.Close()
	if nobody.take() != nil {
		t.Error("nobody has a mover")
	}
}
