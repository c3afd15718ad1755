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
	f      *os.File
	makers *makers
	mem    []byte
	unmap  func()
	next   uint64         // where threads are to go on; the makers' mutex guards it
	left   sync.WaitGroup // of pieces
	bytes  atomic.Uint64  // made
}

// makers are the threads that make the pages of rooms, one room after the other.
type makers struct {
	mutex   sync.Mutex
	rooms   []*room
	threads int
}

// roomBytes is what a thread makes at once, in bytes: 5 ms of small pages.
const roomBytes = 8 << 20

// leastUrgent is the niceness of threads that others go before.
const leastUrgent = 19

// makeRoom begins to make pages for what was found of a source, in a file of a directory, unless that
// has begun before. Where files are on a disk, or much of the memory is zeros, which take no pages, it
// makes none.
func (d *dumper) makeRoom(from source, dir string) {
	h := d.of[from]
	size := uint64(0)
	for _, r := range h.runs {
		size += r.End - r.Start
	}
	if size == 0 || h.done {
		return
	}
	if h.done = true; h.hasZeros(size) {
		return
	}
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return
	}
	r := &room{f: os.NewFile(uintptr(fd), dir), makers: &d.makers, unmap: func() {}}
	if mmapfile.InMemory(r.f) && r.begin(size) == nil {
		h.room = r
	} else {
		r.close()
	}
}

// begin begins to make so many bytes of pages.
func (r *room) begin(size uint64) (err error) {
	if err := r.f.Truncate(int64(size)); err != nil {
		return err
	}
	if r.mem, r.unmap, err = mmapfile.File(r.f, size, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		r.unmap = func() {}
		return err
	}
	_ = unix.Madvise(r.mem, unix.MADV_HUGEPAGE) // without huge pages, small ones
	r.left.Add(int((size + roomBytes - 1) / roomBytes))
	r.makers.add(r)
	return nil
}

// add puts a room behind the others, and has threads make its pages.
func (m *makers) add(r *room) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.rooms = append(m.rooms, r)
	for ; m.threads < max(runtime.NumCPU()/2, 1); m.threads++ { // the driver works on the others
		go m.work()
	}
}

func (m *makers) work() {
	runtime.LockOSThread() // for good: the thread ends with its niceness
	_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), leastUrgent)
	for {
		r, mem := m.take()
		if r == nil {
			return
		}
		if mmapfile.Populate(mem) == nil {
			r.bytes.Add(uint64(len(mem)))
		} else {
			r.drop() // what lacks is made with the copy, which says what is wrong
		}
		r.left.Done()
	}
}

// take returns the next piece of the first room that has one. nil is the end of the thread.
func (m *makers) take() (*room, []byte) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	for len(m.rooms) > 0 {
		r := m.rooms[0]
		if from := r.next; from < uint64(len(r.mem)) {
			r.next = min(from+roomBytes, uint64(len(r.mem)))
			return r, r.mem[from:r.next]
		}
		m.rooms = m.rooms[1:]
	}
	m.threads--
	return nil, nil
}

// drop leaves out the pieces that no thread has begun.
func (r *room) drop() {
	r.makers.mutex.Lock()
	defer r.makers.mutex.Unlock()
	for ; r.next < uint64(len(r.mem)); r.next += roomBytes {
		r.left.Done()
	}
}

// stop ends the making of pages.
func (r *room) stop() {
	r.drop()
	r.left.Wait()
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

// hasZeros reports whether more than one in 16 of some pages is zeros, or cannot be read.
func (h *held) hasZeros(size uint64) bool {
	const looks = 256
	step := max(size/looks/pageBytes, 1) * pageBytes
	var page [pageBytes]byte
	seen, found, skip := 0, 0, uint64(0)
	for _, r := range h.runs {
		at := r.Start + skip
		for ; at < r.End; at += step {
			if h.read(at, page[:]) != nil {
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
