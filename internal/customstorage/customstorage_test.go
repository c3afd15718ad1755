// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package customstorage

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
)

const uuid = "GPU-5af7c0da-0000-4000-8000-000000000000"

var procs = cuda.Group{{PID: cuda.PID{Host: 700, NS: 7}}, {PID: cuda.PID{Host: 800, NS: 8}}, {PID: cuda.PID{Host: 900, NS: 9}, State: cuda.Checkpointed}}

// Files that no area was made of do not stay, those in a directory included.
func TestFilesThatAreNotTaken(t *testing.T) {
	dir, err := os.MkdirTemp("/dev/shm", "gpuckpt-customstorage-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	for _, dir := range []string{dir, ""} {
		s, f := New(procs, dir, map[int]uint64{700: 5})
		if s.Room(procs[0].PID) != 5 || s.Room(procs[1].PID) != 0 {
			t.Error("the room is not that of the use")
		}
		for i := range 2 {
			for _, p := range procs[:2] {
				if _, err := s.File(p.PID, i); err != nil {
					t.Fatal(err)
				}
			}
		}
		areas, files := f.Areas(procs[0].PID, []cuda.Stored{{GPU: uuid, Bytes: 4097}})
		if len(areas) != 1 || areas[0].File != "gpu-7-0" || areas[0].GPU != uuid || areas[0].Bytes != 8192 || areas[0].Start != 0 {
			t.Fatalf("areas: %+v", areas)
		}
		f.Close()
		if _, err := files[0].WriteAt([]byte{1}, 0); err != nil {
			t.Errorf("the area's file: %v", err)
		}
		files[0].Close()
		if dir == "" {
			continue
		}
		if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) != 1 {
			t.Errorf("left are %v, %v", left, err)
		}
	}
}

// A process gets its areas' bytes, and nothing that is no file.
func TestOpen(t *testing.T) {
	dir := t.TempDir()
	path, link := filepath.Join(dir, "gpu-7-0"), filepath.Join(dir, "link")
	if err := os.WriteFile(path, make([]byte, 8192), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	open := func(path string, held bool) (*cuda.Storage, error) {
		s, done, err := Open(procs, func(place int) []Saved {
			if place > 0 {
				return nil
			}
			return []Saved{{Area: images.Area{GPU: uuid, Bytes: 8192}.In(path), Held: held}}
		})
		if err == nil {
			done(t.Context())
			done(t.Context())
		}
		return s, err
	}
	s, err := open(path, false)
	if err != nil {
		t.Fatal(err)
	}
	out := s.Out()
	stored, none := out[procs[0].PID], out[procs[1].PID]
	if len(out) != 2 || len(stored) != 1 || len(none) != 0 || stored[0].GPU != uuid || stored[0].Bytes != 8192 || len(stored[0].Spans) != 1 {
		t.Errorf("out are %+v", out)
	}
	if _, err := stored[0].Spans[0].File.Read(make([]byte, 1)); !errors.Is(err, os.ErrClosed) && !errors.Is(err, io.EOF) {
		t.Errorf("the file is open when all is done: %v", err)
	}
	if _, err := open(link, false); err == nil {
		t.Error("a link was opened")
	}
	if _, err := open(link, true); err != nil { // as to a file that this process has open
		t.Error(err)
	}
	if _, err := open(filepath.Join(dir, "none"), false); err == nil {
		t.Error("a file that is not there was opened")
	}
}
