// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package names

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A file is found by any of its names, below directories alone: no symbolic link leads elsewhere.
func TestFind(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	for _, name := range []string{filepath.Join(dir, "a/b/file"), filepath.Join(outside, "file")} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o700), os.WriteFile(name, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(outside, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	wanted := func(names ...string) map[inode]bool {
		all := make(map[inode]bool)
		for _, name := range names {
			var st unix.Stat_t
			if err := unix.Stat(name, &st); err != nil {
				t.Fatal(err)
			}
			all[inodeOf(&st)] = true
		}
		return all
	}
	found, err := find(t.Context(), os.Getpid(), dir, wanted(dir, filepath.Join(dir, "a/b"), filepath.Join(dir, "a/b/file"), filepath.Join(outside, "file")), unix.PathMax)
	if err != nil {
		t.Fatal(err)
	}
	names := make(map[string]bool)
	for _, name := range found {
		names[name] = true
	}
	if len(names) != 3 || !names[dir] || !names[filepath.Join(dir, "a/b")] || !names[filepath.Join(dir, "a/b/file")] {
		t.Errorf("found %v", names)
	}
	// A volume that is one file, and one of which only the uppermost directories are looked at.
	for _, c := range []struct {
		place       string
		depth, want int
	}{{filepath.Join(dir, "a/b/file"), 0, 1}, {dir, 0, 1}, {dir, 1, 1}, {dir, 2, 2}, {dir, 3, 3}, {filepath.Join(dir, "none"), 1, 0}} {
		found, err := find(t.Context(), os.Getpid(), c.place, wanted(dir, filepath.Join(dir, "a/b"), filepath.Join(dir, "a/b/file")), c.depth)
		if err != nil || len(found) != c.want {
			t.Errorf("in %s, %d deep: found %v, %v", c.place, c.depth, found, err)
		}
	}
	late, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := find(late, os.Getpid(), dir, wanted(filepath.Join(outside, "file")), unix.PathMax); !errors.Is(err, context.Canceled) {
		t.Errorf("given up: %v", err)
	}
}

// Of two open files that had one name nobody knows which a dump means: both are listed.
func TestDeleted(t *testing.T) {
	name := filepath.Join(t.TempDir(), "file")
	other := filepath.Join(filepath.Dir(name), "other") // nobody asks for it
	for _, name := range []string{name, name, name, other} {
		f, err := os.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
	}
	files, err := deleted(func() ([]int, error) { return []int{os.Getpid()}, nil }, map[string]bool{name: true})
	if err != nil || len(files) != 1 || len(files[name]) != 2 {
		t.Errorf("%d files of %d names, %v", len(files[name]), len(files), err)
	}
}

// watching is a context that looks at the memory that is in use, now and then.
type watching struct {
	context.Context
	asked int
	most  uint64
}

func (w *watching) Err() error {
	if w.asked++; w.asked == 90 || w.asked%5000 == 0 {
		var now runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&now)
		w.most = max(w.most, now.HeapAlloc)
	}
	return nil
}

// A program can have directories two thousand deep, with many long names in each.
func TestFindDeep(t *testing.T) {
	top := t.TempDir()
	at, err := unix.Open(top, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range 100 {
		if err := errors.Join(unix.Mknodat(at, "file", unix.S_IFREG|0o600, 0), unix.Mkdirat(at, "d", 0o700)); err != nil {
			t.Fatal(err)
		}
		for n := range 1000 {
			if err := unix.Linkat(at, "file", at, fmt.Sprintf("%0240d", n), 0); err != nil {
				t.Fatal(err)
			}
		}
		next, err := unix.Openat(at, "d", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		unix.Close(at)
		if err != nil {
			t.Fatal(err)
		}
		at = next
	}
	defer unix.Close(at)
	if err := unix.Mknodat(at, "last", unix.S_IFREG|0o600, 0); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Fstatat(at, "last", &st, 0); err != nil {
		t.Fatal(err)
	}
	var before runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	w := &watching{Context: t.Context()}
	found, err := find(w, os.Getpid(), top, map[inode]bool{inodeOf(&st): true, {}: true}, unix.PathMax)
	if want := top + strings.Repeat("/d", 100) + "/last"; err != nil || found[inodeOf(&st)] != want {
		t.Errorf("found %v, %v", found, err)
	}
	if more := w.most - min(w.most, before.HeapAlloc); w.most == 0 || more > 4<<20 {
		t.Errorf("100 directories of 1,000 names took %d KiB", more>>10)
	}
}
