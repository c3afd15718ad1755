// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// hugePage is the size of the huge pages of x86-64 and arm64 (4 KiB granule).
const hugePage = 2 << 20

// A file is filled in chunks, one thread a chunk, in the order of the file: all
// threads are at work before the first chunk is done, so chunks are small. How far
// that is to be ahead of the driver is lead.
const (
	// Measured on an H200's host with 64 cores: the first GiB of a file is filled
	// after 27 ms, and all as fast as in larger chunks, with which it was 74 ms.
	maxFillChunk = 16 << 20
	fillChunks   = 32 // of a file that is smaller than this many of the largest
	maxLead      = 1 << 30
)

// fillers bounds the threads that fill, of all areas together, and fillThreads those
// of one: what is left of the processors is for those that copy. A third of them
// fills one area faster than its driver copies (measured, 16 cores), but half of them
// not four areas (64 cores).
var (
	fillers     = make(chan struct{}, (3*runtime.NumCPU()+3)/4)
	fillThreads = (runtime.NumCPU() + 1) / 2
)

// backing is the file behind a staging area.
type backing struct {
	file          *os.File
	name          string // its path; "" for memory without a name
	start, length uint64 // the area
	offset        uint64 // of the area in the file
	taken         bool   // an empty area is in its place in the process
	early         *earlyCopy
	through       *through // what bounds its memory, for a file on a disk; else nil

	// Filling goes on while the driver copies into what is filled already.
	size, chunk uint64
	cancel      atomic.Bool
	filled      chan struct{} // closed at its end; err is then set
	err         error
	mu          sync.Mutex
	advanced    chan struct{}   // closed, and replaced, when frontier grows
	frontier    uint64          // all before it is filled
	beyond      map[uint64]bool // begins of filled chunks that are not yet before it
}

// fillStep is called before a chunk is filled. A test replaces it, to be slow or
// to fail.
var fillStep = func(from uint64) error { return nil }

// newBacking makes a file for an area and begins to fill it with pages, huge
// where the file system has them, on half of the cores; wait gives the end of
// that. On an error, a file system or memory limit too small among them, the file
// is gone.
func newBacking(path string, start, length uint64) (_ *backing, err error) {
	b := &backing{
		name: path, start: start, length: length, offset: start % hugePage,
		filled: make(chan struct{}), advanced: make(chan struct{}), beyond: make(map[uint64]bool),
	}
	b.size = (b.offset + length + hugePage - 1) &^ (hugePage - 1)
	b.chunk = min(max(hugePage, b.size/fillChunks&^(hugePage-1)), maxFillChunk)
	if path == "" {
		if b.file, err = memoryFile(); err != nil {
			return nil, err
		}
	} else if b.file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return nil, fmt.Errorf("make a file for the area: %w", err)
	}
	err = b.room()
	if err == nil {
		err = b.file.Truncate(int64(b.size))
	}
	if err != nil {
		close(b.filled)
		b.remove()
		return nil, fmt.Errorf("size the area's file: %w", err)
	}
	go func() {
		defer close(b.filled)
		if b.err = b.fill(); b.err != nil {
			b.err = fmt.Errorf("fill %d bytes for the area: %w", b.size, b.err)
		}
	}()
	return b, nil
}

// lead is how many bytes filling has to be ahead of the driver.
func (b *backing) lead() uint64 { return min(max(b.size/2, b.chunk), maxLead) }

// room refuses what would not fit, before anything is filled: a fill that
// fails half-way costs the whole checkpoint.
func (b *backing) room() error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(b.file.Fd()), &st); err != nil {
		return err
	}
	// A file system of no size, such as that of memoryFile, has all the memory.
	if st.Blocks > 0 && st.Bavail*uint64(st.Bsize) < b.size {
		return fmt.Errorf("%d bytes, and the file system has %d: %w", b.size, st.Bavail*uint64(st.Bsize), unix.ENOSPC)
	}
	if room := headroom(); b.size > room {
		return fmt.Errorf("%d bytes, and the memory limit of this cgroup leaves %d: %w", b.size, room, unix.ENOMEM)
	}
	return nil
}

// fill populates the file's pages from the outside, so that they are this
// process's to account for and there before the driver writes to them.
func (b *backing) fill() error {
	// Unlike a write, touching a page that the file system has no room for is
	// SIGBUS; MADV_POPULATE_WRITE answers EFAULT or ENOMEM in its place.
	mem, unmap, err := mapAligned(b.file, b.size, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		return fmt.Errorf("map the file: %w", err)
	}
	defer unmap()
	_ = unix.Madvise(mem, unix.MADV_HUGEPAGE) // without huge pages, small ones
	return inThreads(fillThreads, b.size, b.chunk, func(from, to uint64) error {
		fillers <- struct{}{}
		defer func() { <-fillers }()
		if b.cancel.Load() {
			return os.ErrClosed
		}
		if err := fillStep(from); err != nil {
			return err
		}
		err := populate(mem, from, to)
		if err == nil {
			b.advance(from)
		}
		return err
	})
}

// populate gives a part of a mapping its pages. Those of a tmpfs that is mounted
// without huge pages, as /dev/shm mostly is, are made huge all the same by
// MADV_COLLAPSE (Linux 6.1), which wants one page in each to begin with. What it
// will not make huge stays small.
func populate(mem []byte, from, to uint64) error {
	for at := from; at < to; at += hugePage {
		if err := populatePages(mem[at : at+pageSize]); err != nil {
			return err
		}
	}
	_ = unix.Madvise(mem[from:to], unix.MADV_COLLAPSE)
	return populatePages(mem[from:to])
}

func populatePages(mem []byte) error {
	err := unix.Madvise(mem, unix.MADV_POPULATE_WRITE)
	if errors.Is(err, unix.EFAULT) || errors.Is(err, unix.EHWPOISON) {
		return unix.ENOSPC // what tmpfs means by a fault
	}
	return err
}

// advance notes that a chunk is filled.
func (b *backing) advance(from uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.beyond[from] = true
	for b.beyond[b.frontier] {
		delete(b.beyond, b.frontier)
		b.frontier += b.chunk
	}
	close(b.advanced)
	b.advanced = make(chan struct{})
}

// filledTo gives the frontier, and what tells that it has grown.
func (b *backing) filledTo() (uint64, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.frontier, b.advanced
}

// awaitFilled waits until the file is filled up to a point, or its end.
func (b *backing) awaitFilled(to uint64) error {
	for {
		at, more := b.filledTo()
		if at >= min(to, b.size) {
			return nil
		}
		select {
		case <-more:
		case <-b.filled:
			if b.err != nil {
				return b.err
			}
		}
	}
}

// wait waits for the end of filling, and brings it about where it is bound to
// the driver's progress.
func (b *backing) wait() error {
	if b.through != nil {
		b.cancel.Store(true)
	}
	<-b.filled
	return b.err
}

// mapAligned maps a whole file at an address that huge pages can be used at.
func mapAligned(f *os.File, size uint64, prot int) (mem []byte, unmap func(), err error) {
	room, err := unix.MmapPtr(-1, 0, nil, uintptr(size)+hugePage, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, nil, err
	}
	unmap = func() { _ = unix.MunmapPtr(room, uintptr(size)+hugePage) }
	at := unsafe.Add(room, (hugePage-uintptr(room)%hugePage)%hugePage)
	if _, err := unix.MmapPtr(int(f.Fd()), 0, at, uintptr(size), prot, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		unmap()
		return nil, nil, err
	}
	return unsafe.Slice((*byte)(at), size), unmap, nil
}

// inParallel is inThreads on all cores.
func inParallel(size, chunk uint64, do func(from, to uint64) error) error {
	return inThreads(runtime.NumCPU(), size, chunk, do)
}

// inThreads calls do for [0, size) in chunks, so many at once, and gives the first
// error; chunks after it are not begun.
func inThreads(threads int, size, chunk uint64, do func(from, to uint64) error) error {
	var next atomic.Uint64
	var failed atomic.Bool
	var wg sync.WaitGroup
	errs := make(chan error, threads)
	for range threads {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for !failed.Load() {
				from := next.Add(chunk) - chunk
				if from >= size {
					return
				}
				if err := do(from, min(from+chunk, size)); err != nil {
					failed.Store(true)
					errs <- err
					return
				}
			}
		}()
	}
	wg.Wait()
	select {
	case err := <-errs:
		return err
	default:
		return nil
	}
}

// path names the file for others while this process has it open.
func (b *backing) path() string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), b.file.Fd())
}

// remove gives up the file, its name and its memory.
func (b *backing) remove() {
	b.cancel.Store(true)
	<-b.filled
	b.early.remove()
	if b.name != "" {
		_ = os.Remove(b.name)
	}
	b.file.Close()
}

// mappedBy says whether a process has the whole area mapped to the file, in one
// piece and at the right offset.
func (b *backing) mappedBy(pid int) error {
	// What stat says of a file's device is not what maps say, on btrfs and others.
	page, err := unix.MmapPtr(int(b.file.Fd()), 0, nil, pageSize, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map the area's file: %w", err)
	}
	defer func() { _ = unix.MunmapPtr(page, pageSize) }()
	_, own, err := mappedAt(os.Getpid(), uint64(uintptr(page)), pageSize)
	if err != nil {
		return err
	}
	offset, file, err := mappedAt(pid, b.start, b.length)
	if err != nil {
		return err
	}
	if file == "" || file != own || offset != b.offset {
		return fmt.Errorf("process %d: the driver has changed the staging area at %#x in a way that is not recognised", pid, b.start)
	}
	return nil
}

// mappedAt gives the file, by device and inode, and the offset in it, of a
// process's mapping that has this place; an empty file if there is none.
func mappedAt(pid int, at, length uint64) (offset uint64, file string, err error) {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return 0, "", fmt.Errorf("read the memory map of process %d: %w", pid, err)
	}
	prefix := fmt.Sprintf("%x-%x ", at, at+length)
	for line := range strings.Lines(string(maps)) {
		if !strings.HasPrefix(line, prefix) {
			continue
		}
		// addresses, permissions, offset, device, inode
		if f := strings.Fields(line); len(f) >= 5 {
			offset, err := strconv.ParseUint(f[2], 16, 64)
			return offset, f[3] + " " + f[4], err
		}
	}
	return 0, "", nil
}
