// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package staging

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
)

// checkpointIn makes a checkpoint of one small area.
func checkpointIn(t *testing.T, dir string, state []byte) *images.Checkpoint {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, "gpu-1-0"), state, 0o600); err != nil {
		t.Fatal(err)
	}
	err := images.WriteMetadata(dir, &images.Metadata{
		SchemaVersion: images.SchemaVersion, Created: time.Unix(1, 0), DriverVersion: "580",
		Processes: []images.Process{{PID: 1, State: "running", Areas: []images.Area{{
			File: "gpu-1-0", Start: 1 << 30, Bytes: uint64(len(state)), Digests: []string{images.DigestBlock(state)},
		}}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	c, err := images.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Whatever a container does to the directory of its checkpoint, the files that
// were there, or none, are what is opened; and nothing is written by that way.
func TestPins(t *testing.T) {
	root := t.TempDir()
	dir, elsewhere := filepath.Join(root, images.ImageDir), filepath.Join(root, "elsewhere")
	for _, d := range []string{dir, elsewhere} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	state := make([]byte, 8192)
	state[0] = 1
	c := checkpointIn(t, dir, state)
	secret := filepath.Join(elsewhere, "gpu-1-0")
	if err := os.WriteFile(secret, make([]byte, 8192), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := Pin(c)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	piece := p.At(c.Areas()[0].Location)[0]

	// The directory becomes a link.
	if err := os.Rename(dir, dir+"-was"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(elsewhere, dir); err != nil {
		t.Fatal(err)
	}
	f, err := piece.Open()
	if err != nil {
		t.Fatal(err)
	}
	first := make([]byte, 1)
	if _, err := f.ReadAt(first, 0); err != nil && !errors.Is(err, io.EOF) || first[0] != 1 {
		t.Errorf("read %v, %v: that of another directory", first, err)
	}
	f.Close()
	if f, err := os.OpenFile(piece.Path, os.O_RDWR, 0); !errors.Is(err, unix.EROFS) {
		t.Errorf("opened for writing: %v", err)
		f.Close()
	}
	if p.Changed() {
		t.Error("the pinned file is as it was")
	}
	// So does the file.
	file := filepath.Join(dir+"-was", "gpu-1-0")
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(secret, file); err != nil {
		t.Fatal(err)
	}
	if f, err := piece.Open(); !errors.Is(err, unix.ELOOP) {
		t.Errorf("opened a link: %v", err)
		f.Close()
	}
	if !p.Changed() {
		t.Error("a link took the place of the file, and nobody has seen it")
	}
}

// What was written to a file since Pin is seen, also where its size is the same.
func TestPinsSeeWrites(t *testing.T) {
	dir := t.TempDir()
	p, err := Pin(checkpointIn(t, dir, make([]byte, 8192)))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if p.Changed() {
		t.Error("changed before anything was written")
	}
	f, err := os.OpenFile(filepath.Join(dir, "gpu-1-0"), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	// A file's time of change may be no finer than the kernel's clock, some milliseconds.
	for began := time.Now(); !p.Changed(); {
		if _, err := f.WriteAt([]byte{1}, 5000); err != nil {
			t.Fatal(err)
		}
		if time.Since(began) > time.Minute {
			t.Fatal("what was written was not seen")
		}
	}
}
