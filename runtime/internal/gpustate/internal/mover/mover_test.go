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
	"github.com/gpuckpt/gpuckpt/internal/node/worker"
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

// A request's files fit in a message, also where the area does not begin with one of an image's.
func TestFilesOfARequest(t *testing.T) {
	const blob = 16 << 20 // between zeros, see images/oci
	if files := pieces*piece/blob + 1; files > worker.MaxFiles {
		t.Errorf("a request has up to %d files", files)
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

// A mover that comes up early is taken once, and ends if it is not, or if who takes it gives up.
func TestWarm(t *testing.T) {
	none := errors.New("no mover")
	// begin returns a mover that is never up, and what is closed when it was told to end.
	begin := func() (*Warm, chan struct{}) {
		ended := make(chan struct{})
		return Start(t.Context(), func(ctx context.Context) (*cuda.Mover, error) {
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

	w, ended := begin()
	ctx, cancel := context.WithCancel(t.Context())
	took := make(chan error)
	go func() {
		_, err := w.Take(ctx)
		took <- err
	}()
	for !w.taken.Load() {
		time.Sleep(time.Millisecond)
	}
	if _, err := w.Take(ctx); !errors.Is(err, errTaken) {
		t.Errorf("taken twice: %v", err)
	}
	w.Close()
	select {
	case <-ended:
		t.Fatal("it has ended though it was taken")
	case <-time.After(50 * time.Millisecond):
	}
	cancel()
	if err := <-took; !errors.Is(err, none) {
		t.Errorf("the mover: %v", err)
	}

	w, ended = begin()
	w.Close()
	within(ended)
	w.Close()
	if _, err := w.Take(t.Context()); !errors.Is(err, errTaken) {
		t.Errorf("taken though it was given up: %v", err)
	}
	var nobody *Warm
	nobody.Close()
}

// Memory that nobody has begun to make is none.
func TestNoFill(t *testing.T) {
	w := Start(t.Context(), func(context.Context) (*cuda.Mover, error) { return nil, errors.New("no mover") })
	for _, f := range []*Fill{nil, {warm: w}} {
		if f == nil {
			f.Begin(t.Context(), nil, nil, 1)
		}
		if f.Compared() || f.Take(t.Context(), 0) != nil {
			t.Errorf("%v has memory", f)
		}
		f.Close()
	}
}
