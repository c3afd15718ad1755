// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// hugePage is the size of the huge pages of x86-64 and arm64 (4 KiB granule).
const hugePage = 2 << 20

// fillChunk is how much of a file one thread fills at a time.
const fillChunk = 64 << 20

// backing is the file behind a staging area.
type backing struct {
	file          *os.File
	name          string // its path; "" for a memfd
	start, length uint64 // the area
	offset        uint64 // of the area in the file
	taken         bool   // an empty area is in its place in the process
}

// newBacking makes a file for an area and fills it with pages, huge where the
// file system has them, on all cores. On an error, a full file system or
// memory limit among them, the file is gone.
func newBacking(path string, start, length uint64) (_ *backing, err error) {
	b := &backing{name: path, start: start, length: length, offset: start % hugePage}
	if path == "" {
		fd, err := unix.MemfdCreate("gpuckpt-staging", unix.MFD_CLOEXEC)
		if err != nil {
			return nil, fmt.Errorf("make memory for the area: %w", err)
		}
		b.file = os.NewFile(uintptr(fd), "gpuckpt-staging")
	} else if b.file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return nil, fmt.Errorf("make a file for the area: %w", err)
	}
	if err := b.fill(); err != nil {
		b.remove()
		return nil, err
	}
	return b, nil
}

// fill populates the file's pages from the outside, so that they are this
// process's to account for and there before the driver writes to them.
func (b *backing) fill() error {
	size := (b.offset + b.length + hugePage - 1) &^ (hugePage - 1)
	if room := headroom(); size > room {
		return fmt.Errorf("fill %d bytes for the area: the memory limit of this cgroup leaves %d: %w", size, room, unix.ENOMEM)
	}
	if err := b.file.Truncate(int64(size)); err != nil {
		return fmt.Errorf("size the area's file: %w", err)
	}
	// Unlike a write, touching a page that the file system has no room for is
	// SIGBUS; MADV_POPULATE_WRITE answers EFAULT or ENOMEM in its place.
	mem, unmap, err := mapAligned(b.file, size, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		return fmt.Errorf("map the area's file: %w", err)
	}
	defer unmap()
	_ = unix.Madvise(mem, unix.MADV_HUGEPAGE) // without huge pages, small ones
	err = inParallel(size, fillChunk, func(from, to uint64) error {
		return unix.Madvise(mem[from:to], unix.MADV_POPULATE_WRITE)
	})
	if err != nil {
		if errors.Is(err, unix.EFAULT) || errors.Is(err, unix.EHWPOISON) {
			err = unix.ENOSPC // what tmpfs means by a fault
		}
		return fmt.Errorf("fill %d bytes for the area: %w", size, err)
	}
	return nil
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

// inParallel calls do for [0, size) in chunks on all cores and gives the first
// error; chunks after it are not begun.
func inParallel(size, chunk uint64, do func(from, to uint64) error) error {
	var next atomic.Uint64
	var failed atomic.Bool
	var wg sync.WaitGroup
	errs := make(chan error, runtime.NumCPU())
	for range runtime.NumCPU() {
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
	if b.name != "" {
		_ = os.Remove(b.name)
	}
	b.file.Close()
}

// mappedBy says whether a process has the whole area mapped to the file, in one
// piece and at the right offset.
func (b *backing) mappedBy(pid int) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(b.file.Fd()), &st); err != nil {
		return fmt.Errorf("stat the area's file: %w", err)
	}
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return fmt.Errorf("read the memory map of process %d: %w", pid, err)
	}
	prefix := fmt.Sprintf("%x-%x ", b.start, b.start+b.length)
	for line := range strings.Lines(string(maps)) {
		if !strings.HasPrefix(line, prefix) {
			continue
		}
		var start, end, offset, inode uint64
		var major, minor uint32
		var perms string
		if n, _ := fmt.Sscanf(line, "%x-%x %s %x %x:%x %d", &start, &end, &perms, &offset, &major, &minor, &inode); n != 7 {
			continue
		}
		if offset == b.offset && inode == st.Ino && unix.Mkdev(major, minor) == st.Dev {
			return nil
		}
	}
	return fmt.Errorf("process %d: the driver has changed the staging area at %#x in a way that is not recognised", pid, b.start)
}
