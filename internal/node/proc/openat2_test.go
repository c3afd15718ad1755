// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// A path with ".." is opened while others rename files.
func TestOpenat2(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "a/b"), 0o700); err != nil {
		t.Fatal(err)
	}
	root, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(root)
	end, ended := make(chan struct{}), make(chan error)
	go func() {
		one, two := filepath.Join(dir, "one"), filepath.Join(dir, "two")
		err := os.Mkdir(one, 0o700)
		for err == nil {
			select {
			case <-end:
				ended <- nil
				return
			default:
			}
			err = os.Rename(one, two)
			one, two = two, one
		}
		ended <- err
	}()
	again := 0
	for range 20_000 {
		how := &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT}
		fd, err := Openat2(root, "a/b/../b/../b/../b/..", how)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
		if fd, err = unix.Openat2(root, "a/b/../b/../b/../b/..", how); err != nil {
			again++
			continue
		}
		unix.Close(fd)
	}
	close(end)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	t.Logf("the kernel wanted to be asked again %d times", again)
}
