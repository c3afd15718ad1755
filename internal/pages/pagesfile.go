// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/mapped"
)

// pagesFile is a new image of memory that many threads write. The kernel lets one thread at a time
// write to a file: on a tmpfs that is as slow as one processor. So a file in memory is mapped, and
// its pages come from as many threads as there are.
type pagesFile struct {
	f     *os.File
	mem   []byte // nil for a file that is written
	unmap func()
}

// newPagesFile makes an empty file, open for reading and writing, as long as its pages are, and maps it
// if that is asked for. close must be called.
func newPagesFile(f *os.File, bytes uint64, inMemory bool) (*pagesFile, error) {
	p := &pagesFile{f: f, unmap: func() {}}
	if err := f.Truncate(int64(bytes)); err != nil || !inMemory || bytes == 0 {
		return p, err
	}
	mem, unmap, err := mapped.File(f, bytes, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", f.Name(), err)
	}
	p.mem, p.unmap = mem, unmap
	_ = unix.Madvise(p.mem, unix.MADV_HUGEPAGE) // without huge pages, small ones
	return p, nil
}

// close unmaps the file, which stays open.
func (p *pagesFile) close() {
	p.unmap()
	p.mem, p.unmap = nil, func() {}
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
		if err := mapped.Populate(into); err != nil {
			return fmt.Errorf("write %s: %w", p.f.Name(), err)
		}
		copy(into, pages[from:to])
		return nil
	})
}
