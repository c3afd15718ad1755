// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package mmapfile maps files in memory so that many threads can read and write them at once, by huge
// pages where the file system has them. A tmpfs lets one thread at a time write(2) to a file, and
// copies what it reads.
package mmapfile

import (
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sync/errgroup"
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
	return mapPart(f, 0, size, prot)
}

// mapPart is File, from an offset on that is one of a huge page.
func mapPart(f *os.File, offset int64, size uint64, prot int) (mem []byte, unmap func(), err error) {
	room, err := unix.MmapPtr(-1, 0, nil, uintptr(size)+HugePage, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, nil, err
	}
	unmap = func() { _ = unix.MunmapPtr(room, uintptr(size)+HugePage) }
	at := unsafe.Add(room, (HugePage-uintptr(room)%HugePage)%HugePage)
	if _, err := unix.MmapPtr(int(f.Fd()), offset, at, uintptr(size), prot, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		unmap()
		return nil, nil, err
	}
	return unsafe.Slice((*byte)(at), size), unmap, nil
}

// Populate gives a part of a writable mapping its pages, which begin at a page: huge ones where it has
// the place of whole ones. A touch of a page that the file system has no room for would be SIGBUS;
// Populate is ENOSPC there. ENOMEM is the cgroup's limit.
//
// A tmpfs that is mounted without huge pages, as /dev/shm mostly is, has them all the same by
// MADV_COLLAPSE (Linux 6.1), which needs one small page in each to begin with. 16 threads fill 16 GiB in
// 0.7 s so, and in 3.4 s with small pages (H200, Linux 6.18). Where that fails the pages are small.
func Populate(mem []byte) error {
	first := -uintptr(unsafe.Pointer(unsafe.SliceData(mem))) % HugePage
	at := first
	for ; at+HugePage <= uintptr(len(mem)); at += HugePage {
		if err := populate(mem[at:][:os.Getpagesize()]); err != nil {
			return err
		}
	}
	if at > first {
		_ = unix.Madvise(mem[first:at], unix.MADV_COLLAPSE)
	}
	return populate(mem)
}

func populate(mem []byte) error {
	err := unix.Madvise(mem, unix.MADV_POPULATE_WRITE)
	if errors.Is(err, unix.EFAULT) || errors.Is(err, unix.EHWPOISON) {
		return unix.ENOSPC // what tmpfs means by a fault
	}
	return err
}

// windowBytes is what a Writer maps at once, in bytes.
const windowBytes = 16 << 20

// Writer writes a file from its begin, from one thread. A file in memory gets huge pages, but for the
// first HugePage: small files take no more than they have. Close must be called.
type Writer struct {
	f      *os.File
	size   int64  // the file keeps it; 0: it gets what was written
	at     int64  // where the next byte goes
	made   int64  // where the file ends, if that was made longer than what is written
	window []byte // what is left of the part of the file that is mapped
	unmap  func()
}

// NewWriter returns a writer of a file, which stays open. size is the file's, if it has its full size
// already; else 0.
func NewWriter(f *os.File, size int64) *Writer {
	return &Writer{f: f, size: size, unmap: func() {}}
}

// Write writes the next bytes.
func (w *Writer) Write(p []byte) (n int, err error) {
	for n < len(p) {
		if len(w.window) == 0 {
			w.open()
		}
		var m int
		if len(w.window) > 0 {
			m = copy(w.window, p[n:])
			w.window = w.window[m:]
		} else {
			part := p[n:]
			if w.at < HugePage {
				part = part[:min(int64(len(part)), HugePage-w.at)]
			}
			m, err = w.f.WriteAt(part, w.at)
		}
		n += m
		if w.at += int64(m); err != nil {
			return n, err
		}
	}
	return n, nil
}

// open maps the part of the file that comes next, with its pages. Without a window the file is written,
// and an error shows then.
func (w *Writer) open() {
	w.unmap()
	w.unmap = func() {}
	bytes := int64(windowBytes)
	if w.size > 0 {
		bytes = min(bytes, w.size-w.at)
	}
	if w.at == 0 || w.at%HugePage != 0 || bytes < HugePage || !InMemory(w.f) {
		return
	}
	if w.size == 0 {
		if w.f.Truncate(w.at+bytes) != nil {
			return
		}
		w.made = w.at + bytes
	}
	mem, unmap, err := mapPart(w.f, w.at, uint64(bytes), unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		return
	}
	if Populate(mem) != nil {
		unmap()
		if w.made > 0 && w.f.Truncate(w.at) == nil { // others may need the room
			w.made = 0
		}
		return
	}
	w.window, w.unmap = mem, unmap
}

// Close ends the writing, and cuts what was made beyond the last byte.
func (w *Writer) Close() error {
	w.unmap()
	beyond := w.made > w.at
	w.window, w.unmap, w.made = nil, func() {}, 0
	if beyond {
		return w.f.Truncate(w.at)
	}
	return nil
}

// Copy writes all that a reader has into an empty file, which stays open. If the file is in memory, all processors
// do, into huge pages.
func Copy(f *os.File, from *io.SectionReader) error {
	if from.Size() < 2*windowBytes || !InMemory(f) {
		to := NewWriter(f, 0)
		_, err := io.Copy(to, from)
		return errors.Join(err, to.Close())
	}
	if err := f.Truncate(from.Size()); err != nil {
		return err
	}
	group, failed := errgroup.WithContext(context.Background())
	group.SetLimit(runtime.NumCPU())
	for at := int64(0); at < from.Size() && failed.Err() == nil; at += windowBytes {
		group.Go(func() error {
			mem, unmap, err := mapPart(f, at, uint64(min(windowBytes, from.Size()-at)), unix.PROT_READ|unix.PROT_WRITE)
			if err != nil {
				return err
			}
			defer unmap()
			if err := Populate(mem); err != nil {
				return &os.PathError{Op: "write", Path: f.Name(), Err: err}
			}
			if n, err := from.ReadAt(mem, at); n < len(mem) {
				return cmp.Or(err, io.ErrUnexpectedEOF)
			}
			return nil
		})
	}
	return group.Wait()
}
