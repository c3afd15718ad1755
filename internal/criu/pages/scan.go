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

// dumper is the worker's side of a Dump.
type dumper struct {
	runs map[int][]span // what was scanned of each process
	kept map[int][]span // the spans that they are of
	room map[int]*room  // of each process; nil where there is none to be made
}

func newDumper() *dumper {
	return &dumper{runs: make(map[int][]span), kept: make(map[int][]span), room: make(map[int]*room)}
}

// scan chooses those of the spans that hold enough memory, and remembers what they hold, until the next
// scan of the process.
func (d *dumper) scan(pid int, spans []span, least uint64) ([]span, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", pid))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	zero, err := zeroFrame()
	if err != nil {
		return nil, err
	}
	delete(d.kept, pid)
	delete(d.runs, pid)
	for _, s := range spans {
		runs, err := scan(f, s, zero)
		if err != nil {
			return nil, err
		}
		bytes := uint64(0)
		for _, r := range runs {
			bytes += r.End - r.Start
		}
		if bytes >= least && bytes/uint64(len(runs)) >= leastRun {
			d.kept[pid], d.runs[pid] = append(d.kept[pid], s), append(d.runs[pid], runs...)
		}
	}
	return d.kept[pid], nil
}
