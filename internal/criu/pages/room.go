// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"bytes"
	"os"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/mmapfile"
)

// room is a file in memory, without a name, whose pages threads make that take no time from anybody who
// waits for nothing: a new page takes longer than the copy into it. A nil room is none.
type room struct {
	f       *os.File
	stopped atomic.Bool
	threads sync.WaitGroup
	unmap   func()
	bytes   atomic.Uint64 // made
}

// roomBytes is what a thread makes at once, in bytes: 5 ms of small pages.
const roomBytes = 8 << 20

// leastUrgent is the niceness of threads that others go before.
const leastUrgent = 19

// makeRoom begins to make pages for what was scanned of a process, in a file of a directory, unless that
// has begun before. Where files are on a disk, or much of the memory is zeros, which take no pages, it
// makes none.
func (d *dumper) makeRoom(pid int, dir string) {
	size := uint64(0)
	for _, r := range d.runs[pid] {
		size += r.End - r.Start
	}
	if _, known := d.room[pid]; size == 0 || known {
		return
	}
	d.room[pid] = nil
	if hasZeros(pid, d.runs[pid], size) {
		return
	}
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return
	}
	r := &room{f: os.NewFile(uintptr(fd), dir), unmap: func() {}}
	if mmapfile.InMemory(r.f) && r.begin(size) == nil {
		d.room[pid] = r
	} else {
		r.close()
	}
}

// begin begins to make so many bytes of pages.
func (r *room) begin(size uint64) error {
	if err := r.f.Truncate(int64(size)); err != nil {
		return err
	}
	mem, unmap, err := mmapfile.File(r.f, size, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		return err
	}
	r.unmap = unmap
	_ = unix.Madvise(mem, unix.MADV_HUGEPAGE) // without huge pages, small ones
	var next atomic.Uint64
	for range max(runtime.NumCPU()/2, 1) { // the driver works on the others
		r.threads.Go(func() {
			runtime.LockOSThread() // for good: the thread ends with its niceness
			_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), leastUrgent)
			for !r.stopped.Load() {
				from := next.Add(roomBytes) - roomBytes
				to := min(from+roomBytes, size)
				if from >= size || mmapfile.Populate(mem[from:to]) != nil {
					return // what lacks is made with the copy, which says what is wrong
				}
				r.bytes.Add(to - from)
			}
		})
	}
	return nil
}

// stop ends the making of pages.
func (r *room) stop() {
	r.stopped.Store(true)
	r.threads.Wait()
	r.unmap()
	r.unmap = func() {}
}

// take returns the file, which is the caller's to close, with the pages that were made; nil of no room.
func (r *room) take() *os.File {
	if r == nil {
		return nil
	}
	r.stop()
	f := r.f
	r.f = nil
	return f
}

// made returns how many bytes of pages were made.
func (r *room) made() uint64 {
	if r == nil {
		return 0
	}
	return r.bytes.Load()
}

// close ends the room. What was not taken is gone.
func (r *room) close() {
	if r == nil {
		return
	}
	if r.stop(); r.f != nil {
		_ = r.f.Close()
	}
}

// hasZeros reports whether more than one in 16 of some pages of a process is zeros, or cannot be read.
func hasZeros(pid int, runs []span, size uint64) bool {
	const looks = 256
	step := max(size/looks/pageBytes, 1) * pageBytes
	var page [pageBytes]byte
	seen, found, skip := 0, 0, uint64(0)
	for _, r := range runs {
		at := r.Start + skip
		for ; at < r.End; at += step {
			if readMemory(pid, at, page[:]) != nil {
				return true
			}
			if seen++; bytes.Equal(page[:], zeros[:]) {
				found++
			}
		}
		skip = at - r.End
	}
	return found > seen/16
}
