// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pagesFile is a new image of memory that many threads write. The kernel lets one thread at a time
// write to a file: on a tmpfs that is as slow as one processor. So a file in memory is mapped, and
// its pages come from as many threads as there are.
type pagesFile struct {
	f   *os.File
	mem []byte // nil for a file that is written
	// reserved is what Close unmaps.
	reserved unsafe.Pointer
	length   uintptr
}

// hugePage is the size of a huge page, in bytes.
const hugePage = 2 << 20

// newPagesFile makes an empty file, open for reading and writing, as long as its pages are, and maps it
// if that is asked for. close must be called.
func newPagesFile(f *os.File, bytes uint64, mapped bool) (*pagesFile, error) {
	p := &pagesFile{f: f}
	if err := f.Truncate(int64(bytes)); err != nil || !mapped || bytes == 0 {
		return p, err
	}
	// Huge pages need a mapping that begins at one of them.
	p.length = uintptr(bytes) + hugePage
	var err error
	if p.reserved, err = unix.MmapPtr(-1, 0, nil, p.length, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE); err != nil {
		return nil, fmt.Errorf("map %s: %w", f.Name(), err)
	}
	at := unsafe.Add(p.reserved, -uintptr(p.reserved)%hugePage)
	if _, err := unix.MmapPtr(int(f.Fd()), 0, at, uintptr(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		p.close()
		return nil, fmt.Errorf("map %s: %w", f.Name(), err)
	}
	p.mem = unsafe.Slice((*byte)(at), bytes)
	_ = unix.Madvise(p.mem, unix.MADV_HUGEPAGE) // without huge pages, small ones
	return p, nil
}

// close unmaps the file, which stays open.
func (p *pagesFile) close() {
	if p.reserved != nil {
		_ = unix.MunmapPtr(p.reserved, p.length)
	}
	p.reserved, p.mem = nil, nil
}

// write writes whole pages at an offset. Pages of zeros become holes. Where there are few of them in
// a file in memory, they may become pages of zeros: a huge page has no holes.
func (p *pagesFile) write(pages []byte, offset uint64) error {
	used := 0
	_ = eachWritten(pages, func(from, to int) error {
		used += to - from
		return nil
	})
	return eachWritten(pages, func(from, to int) error {
		at := offset + uint64(from)
		if p.mem == nil || used <= len(pages)/2 {
			_, err := p.f.WriteAt(pages[from:to], int64(at))
			return err
		}
		into := p.mem[at : at+uint64(to-from)]
		// A touch of a page that the file system has no room for would end this process.
		if err := unix.Madvise(into, unix.MADV_POPULATE_WRITE); err != nil {
			if errors.Is(err, unix.EFAULT) || errors.Is(err, unix.EHWPOISON) {
				err = unix.ENOSPC // what tmpfs means by it
			}
			return fmt.Errorf("write %s: %w", p.f.Name(), err)
		}
		copy(into, pages[from:to])
		return nil
	})
}

// inMemory reports whether a file's pages are all there is of it.
func inMemory(f *os.File) bool {
	var st unix.Statfs_t
	return unix.Fstatfs(int(f.Fd()), &st) == nil && st.Type == unix.TMPFS_MAGIC
}
