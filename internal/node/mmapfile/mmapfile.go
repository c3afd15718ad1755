// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package mmapfile maps files in memory so that many threads can read and write them at once, by huge
// pages where the file system has them. A tmpfs lets one thread at a time write(2) to a file, and
// copies what it reads.
package mmapfile

import (
	"errors"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// HugePage is the size of the huge pages of x86-64 and arm64 (4 KiB granule), in bytes.
const HugePage = 2 << 20

// InMemory reports whether a file is on a tmpfs: its pages are all there is of it.
func InMemory(f *os.File) bool {
	var st unix.Statfs_t
	return unix.Fstatfs(int(f.Fd()), &st) == nil && st.Type == unix.TMPFS_MAGIC
}

// File maps the first size bytes of a file, shared, at an address that huge pages can be used at.
// prot is of mmap(2). A touch beyond the file's end is SIGBUS. unmap is called once, after the last
// use of mem. On an error nothing is mapped.
func File(f *os.File, size uint64, prot int) (mem []byte, unmap func(), err error) {
	room, err := unix.MmapPtr(-1, 0, nil, uintptr(size)+HugePage, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, nil, err
	}
	unmap = func() { _ = unix.MunmapPtr(room, uintptr(size)+HugePage) }
	at := unsafe.Add(room, (HugePage-uintptr(room)%HugePage)%HugePage)
	if _, err := unix.MmapPtr(int(f.Fd()), 0, at, uintptr(size), prot, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		unmap()
		return nil, nil, err
	}
	return unsafe.Slice((*byte)(at), size), unmap, nil
}

// Populate gives a part of a writable mapping its pages, which begin at a page. A touch of a page
// that the file system has no room for would be SIGBUS; Populate is ENOSPC there. ENOMEM is the
// cgroup's limit.
func Populate(mem []byte) error {
	err := unix.Madvise(mem, unix.MADV_POPULATE_WRITE)
	if errors.Is(err, unix.EFAULT) || errors.Is(err, unix.EHWPOISON) {
		return unix.ENOSPC // what tmpfs means by a fault
	}
	return err
}
