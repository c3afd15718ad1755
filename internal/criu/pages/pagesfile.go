// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/mmapfile"
)

// pagesFile is a new image of memory that many threads write. The kernel lets one thread at a time
// write to a file: on a tmpfs that is as slow as one processor. So a file in memory is mapped, and
// its pages come from as many threads as there are.
type pagesFile struct {
	f     *os.File
	mem   []byte // nil for a file that is written
	made  bool   // the file has pages already, of zeros
	unmap func()
}

// newPagesFile makes a file without bytes in it, open for reading and writing, as long as its pages are,
// and maps it if that is asked for. It may have pages of zeros. close must be called.
func newPagesFile(f *os.File, bytes uint64, inMemory bool) (*pagesFile, error) {
	p := &pagesFile{f: f, unmap: func() {}}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, err
	}
	p.made = st.Blocks > 0
	if err := f.Truncate(int64(bytes)); err != nil || !inMemory || bytes == 0 {
		return p, err
	}
	mem, unmap, err := mmapfile.File(f, bytes, unix.PROT_READ|unix.PROT_WRITE)
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
	if p.made && used <= len(pages)/2 {
		if err := unix.Fallocate(int(p.f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(offset), int64(len(pages))); err != nil {
			return fmt.Errorf("make a hole in %s: %w", p.f.Name(), err)
		}
	}
	return eachWritten(pages, func(from, to int) error {
		at := offset + uint64(from)
		if p.mem == nil || used <= len(pages)/2 {
			_, err := p.f.WriteAt(pages[from:to], int64(at))
			return err
		}
		into := p.mem[at : at+uint64(to-from)]
		if err := mmapfile.Populate(into); err != nil {
			return fmt.Errorf("write %s: %w", p.f.Name(), err)
		}
		copy(into, pages[from:to])
		return nil
	})
}
