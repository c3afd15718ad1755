// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"encoding/binary"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Bits of an entry of /proc/PID/pagemap (Documentation/admin-guide/mm/pagemap.rst).
const (
	pagePresent = 1 << 63
	pageSwapped = 1 << 62
	pageGuard   = 1 << 58
	pageFrame   = 1<<55 - 1
)

// scan returns the runs of pages of a span that CRIU would dump: those with memory of their own, in
// RAM or swapped out. zero is the frame of the kernel's page of zeros.
func scan(pagemap *os.File, s span, zero uint64) (runs []span, err error) {
	buf := make([]byte, 64<<10)
	for at := s.Start; at < s.End; {
		n := min((s.End-at)/pageBytes*8, uint64(len(buf)))
		if _, err := pagemap.ReadAt(buf[:n], int64(at/pageBytes*8)); err != nil {
			return nil, fmt.Errorf("read which pages are there: %w", err)
		}
		for i := uint64(0); i < n; i, at = i+8, at+pageBytes {
			e := binary.LittleEndian.Uint64(buf[i:])
			if e&(pagePresent|pageSwapped) == 0 || e&pageGuard != 0 || e&pagePresent != 0 && zero != 0 && e&pageFrame == zero {
				continue
			}
			if last := len(runs) - 1; last >= 0 && runs[last].End == at {
				runs[last].End += pageBytes
			} else {
				runs = append(runs, span{at, at + pageBytes})
			}
		}
	}
	return runs, nil
}

// zeroFrame returns the frame of the kernel's page of zeros: that of memory that was read and never
// written. 0 is returned to who may not know it.
func zeroFrame() (uint64, error) {
	mem, err := unix.Mmap(-1, 0, pageBytes, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return 0, err
	}
	defer func() { _ = unix.Munmap(mem) }()
	if mem[0] != 0 {
		return 0, fmt.Errorf("new memory has %d", mem[0])
	}
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	var b [8]byte
	if _, err := f.ReadAt(b[:], int64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))/pageBytes*8)); err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint64(b[:]) & pageFrame, nil
}

// source is whose memory is dumped: a process, or a segment of shared memory, by its inode and a process
// that has it mapped.
type source struct {
	pid    int
	shared bool
	inode  uint64 // that of a segment of shmget may be 0
}

func (o *order) source() source { return source{o.PID, o.Shared, o.Inode} }

// held is what was found of a source, until the next scan of it.
type held struct {
	kept []span // with enough memory
	runs []span // what they hold
	read reader
	file *os.File // of a segment
	room *room    // nil where there is none to be made
	done bool     // the room is decided about
}

// dumper is the worker's side of a Dump.
type dumper struct {
	of     map[source]*held
	makers makers
}

func newDumper() *dumper { return &dumper{of: make(map[source]*held)} }

// scan chooses those of the spans that together hold the least memory, and remembers what they hold, until the next
// scan of the source. A segment is one span, from its begin.
func (d *dumper) scan(from source, spans []span, least uint64) (_ []span, err error) {
	h := d.of[from]
	if h == nil {
		h = new(held)
		d.of[from] = h
	}
	h.kept, h.runs, h.read = nil, nil, memoryOf(from.pid)
	var runsOf func(span) ([]span, error)
	if from.shared {
		h.file.Close() // of the scan before; nil is none
		if h.file, err = openSegment(from, spans[0]); err != nil || h.file == nil {
			return nil, err
		}
		size, err := sizeOf(h.file)
		if err != nil {
			return nil, err
		}
		h.read = contentOf(h.file, size)
		spans = []span{{0, roundUp(size)}}
		runsOf = func(span) ([]span, error) { return scanFile(h.file) }
	} else {
		f, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", from.pid))
		if err != nil {
			return nil, err
		}
		defer f.Close()
		zero, err := zeroFrame()
		if err != nil {
			return nil, err
		}
		runsOf = func(s span) ([]span, error) { return scan(f, s, zero) }
	}
	total := uint64(0)
	for _, s := range spans {
		runs, err := runsOf(s)
		if err != nil {
			return nil, err
		}
		bytes := uint64(0)
		for _, r := range runs {
			bytes += r.End - r.Start
		}
		if len(runs) > 0 && bytes >= least/leastPart && bytes/uint64(len(runs)) >= leastRun {
			h.kept, h.runs = append(h.kept, s), append(h.runs, runs...)
			total += bytes
		}
	}
	if total < least {
		h.kept, h.runs = nil, nil
	}
	return h.kept, nil
}

// close ends what a source has, and nobody has taken.
func (h *held) close() {
	h.room.close()
	h.file.Close()
}
