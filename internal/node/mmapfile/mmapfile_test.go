// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package mmapfile

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// small makes a tmpfs of one huge page's size, and a file in it.
func small(t *testing.T, size int64) *os.File {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=2m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	f, err := os.Create(filepath.Join(dir, "file"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return f
}

// What is written by way of a mapping is in the file, and the mapping begins at a huge page.
func TestFile(t *testing.T) {
	f := small(t, 8192)
	if !InMemory(f) {
		t.Error("a file on a tmpfs is not in memory")
	}
	mem, unmap, err := File(f, 8192, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		t.Fatal(err)
	}
	if at := uintptr(unsafe.Pointer(unsafe.SliceData(mem))); at%HugePage != 0 || len(mem) != 8192 {
		t.Errorf("%d bytes at %#x", len(mem), at)
	}
	if err := Populate(mem[4096:]); err != nil {
		t.Fatal(err)
	}
	mem[4097] = 7
	unmap()
	var got [1]byte
	if _, err := f.ReadAt(got[:], 4097); err != nil || got[0] != 7 {
		t.Errorf("the file has %v, %v", got, err)
	}
}

func TestFileFails(t *testing.T) {
	f := small(t, 4096)
	f.Close()
	if _, _, err := File(f, 4096, unix.PROT_READ); err == nil {
		t.Error("mapped a closed file")
	}
}

// A file system without room is an error in the place of a signal.
func TestPopulateNoRoom(t *testing.T) {
	f := small(t, 2*HugePage)
	mem, unmap, err := File(f, 2*HugePage, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		t.Fatal(err)
	}
	defer unmap()
	if err := Populate(mem); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("got %v, want ENOSPC", err)
	}
}
