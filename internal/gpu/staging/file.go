// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package staging

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/mmapfile"
)

const (
	// PageSize is the smallest page of the processes, in bytes.
	PageSize = 4096
	// HugePage is the size of a huge page, in bytes.
	HugePage = mmapfile.HugePage
)

// A file is filled in chunks, one thread a chunk, in the order of the file. All threads are at work
// before the first chunk is done, so chunks are small. Lead is how far filling must be ahead of the
// driver.
const (
	// Measured on an H200's host with 64 cores: the first GiB of a file is filled after 27 ms
	// instead of 74 ms with larger chunks, and all as fast.
	maxFillChunk = 16 << 20
	fillChunks   = 32 // of a file that is smaller than this many of the largest
	maxLead      = 1 << 30
)

// spare is what the workers take of the cgroup after they have made a file: the kernel kills one otherwise.
const spare = 16 << 20

// Filler makes the files of staging areas and fills them with pages. One Filler is for all areas of
// this process: it bounds the threads that fill.
type Filler struct {
	// Step is called after each part of a write-through, Fill before a chunk is filled; its error
	// ends the filling. Tests replace them.
	Step func(what string)
	Fill func(from uint64) error

	slots   chan struct{} // one for each thread that fills, of all areas together
	threads int           // that fill one area
}

// NewFiller returns a Filler, which leaves processors to the threads that copy. A third of them
// fills one area faster than its driver copies (measured, 16 cores), but half of them does not fill
// four areas (64 cores).
func NewFiller() *Filler {
	return &Filler{
		Step:    func(string) {},
		Fill:    func(uint64) error { return nil },
		slots:   make(chan struct{}, (3*runtime.NumCPU()+3)/4),
		threads: (runtime.NumCPU() + 1) / 2,
	}
}

// File is the file behind a staging area.
type File struct {
	Handle        *os.File
	Start, Length uint64 // the area
	Offset        uint64 // of the area in the file

	filler  *Filler
	name    string // its path; "" for memory without a name
	behind  *writeBehind
	through *WriteThrough // what bounds its memory, for a file on a disk; else nil

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

// newFile returns the description of an area's file; the file itself is not made.
func (fl *Filler) newFile(name string, start, length uint64) *File {
	b := &File{
		filler: fl, name: name, Start: start, Length: length, Offset: start % HugePage,
		filled: make(chan struct{}), advanced: make(chan struct{}), beyond: make(map[uint64]bool),
	}
	b.size = (b.Offset + length + HugePage - 1) &^ (HugePage - 1)
	return b
}

// NewFile makes a file for an area and begins to fill it with pages, huge ones if the file system
// has them, on half of the cores. Wait waits for the end of that. An empty path is memory without a
// name. On an error, such as a file system or a memory limit that is too small, the file is gone.
func (fl *Filler) NewFile(path string, start, length uint64) (_ *File, err error) {
	b := fl.newFile(path, start, length)
	b.chunk = min(max(HugePage, b.size/fillChunks&^(HugePage-1)), maxFillChunk)
	if path == "" {
		if b.Handle, err = MemoryFile(b.size); err != nil {
			return nil, err
		}
	} else if b.Handle, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return nil, fmt.Errorf("make a file for the area: %w", err)
	}
	err = b.checkSpace()
	if err == nil && path != "" {
		err = b.Handle.Truncate(int64(b.size))
	}
	if err != nil {
		close(b.filled)
		b.Remove()
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

// Lead is how many bytes filling has to be ahead of the driver.
func (b *File) Lead() uint64 { return min(max(b.size/2, b.chunk), maxLead) }

// checkSpace refuses an area that does not fit: a fill that fails costs the whole checkpoint.
func (b *File) checkSpace() error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(b.Handle.Fd()), &st); err != nil {
		return err
	}
	// A file system of no size has all the memory.
	if st.Blocks > 0 && st.Bavail*uint64(st.Bsize) < b.size {
		return fmt.Errorf("%d bytes, and the file system has %d: %w", b.size, st.Bavail*uint64(st.Bsize), unix.ENOSPC)
	}
	if room := host.Headroom(""); b.size+spare > room {
		return fmt.Errorf("%d bytes and %d for the workers, and the memory limit of this cgroup leaves %d: %w", b.size, spare, room, unix.ENOMEM)
	}
	return nil
}

// fill populates the file's pages, so that they are there before the driver writes to them, and are
// charged to this process's cgroup.
func (b *File) fill() error {
	mem, unmap, err := mmapfile.File(b.Handle, b.size, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		return fmt.Errorf("map the file: %w", err)
	}
	defer unmap()
	_ = unix.Madvise(mem, unix.MADV_HUGEPAGE) // without huge pages, small ones
	return inThreads(b.filler.threads, b.size, b.chunk, func(from, to uint64) error {
		b.filler.slots <- struct{}{}
		defer func() { <-b.filler.slots }()
		if b.cancel.Load() {
			return os.ErrClosed
		}
		if err := b.filler.Fill(from); err != nil {
			return err
		}
		err := mmapfile.Populate(mem[from:to])
		if err == nil {
			b.advance(from)
		}
		return err
	})
}

func (b *File) advance(from uint64) {
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

// FilledTo returns how far the file is filled, and a channel that is closed when that grows.
func (b *File) FilledTo() (uint64, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.frontier, b.advanced
}

// AwaitFilled waits until the file is filled up to a point, or to its end.
func (b *File) AwaitFilled(to uint64) error {
	for {
		at, more := b.FilledTo()
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

// Filled returns a channel that is closed at the end of filling: Wait then returns at once, except
// for a write-through, which it ends.
func (b *File) Filled() <-chan struct{} { return b.filled }

// Wait waits for the end of filling. It ends a write-through, which goes on with the driver.
func (b *File) Wait() error {
	if b.through != nil {
		b.cancel.Store(true)
	}
	<-b.filled
	return b.err
}

// inThreads calls do for [0, size) in chunks, so many at once, and returns the first error.
func inThreads(threads int, size, chunk uint64, do func(from, to uint64) error) error {
	var next atomic.Uint64
	group, ctx := errgroup.WithContext(context.Background())
	for range threads {
		group.Go(func() error {
			for ctx.Err() == nil {
				from := next.Add(chunk) - chunk
				if from >= size {
					return nil
				}
				if err := do(from, min(from+chunk, size)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return group.Wait()
}

// Path names the file for other processes while this process has it open.
func (b *File) Path() string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), b.Handle.Fd())
}

// Remove gives up the file, its name and its memory, also that which a process may have mapped.
func (b *File) Remove() {
	b.Unlink()
	_ = b.Handle.Truncate(0)
	b.Handle.Close()
}

// Unlink gives up the file's name, and leaves what is in the file to who has it open or mapped.
func (b *File) Unlink() {
	b.cancel.Store(true)
	<-b.filled
	b.behind.remove()
	if b.name != "" {
		_ = os.Remove(b.name)
	}
}

// WrittenBeyond reports whether the area has more than zeros from a point of its file on.
func (b *File) WrittenBeyond(from uint64) (bool, error) {
	buf, zeros := make([]byte, 1<<20), make([]byte, 1<<20)
	for end := b.Offset + b.Length; from < end; {
		at, err := b.Handle.Seek(int64(from), unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) || err == nil && uint64(at) >= end {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("look at what is written of an area: %w", err)
		}
		n, err := b.Handle.ReadAt(buf[:min(uint64(len(buf)), end-uint64(at))], at)
		if err != nil && !errors.Is(err, io.EOF) {
			return false, fmt.Errorf("look at what is written of an area: %w", err)
		}
		if !bytes.Equal(buf[:n], zeros[:n]) {
			return true, nil
		}
		from = uint64(at) + uint64(n)
	}
	return false, nil
}

// MemoryFile makes a file of memory without a name, of a size in whole huge pages, with huge pages for
// mappings that ask for them by madvise. It cannot become larger: a process that it is lent to may keep
// a descriptor. A memfd has huge pages only if the whole machine's shmem_enabled says so, which is
// "never" by default, or by MADV_COLLAPSE, since Linux 6.1; the driver takes twice as long to fill small
// pages. So the file is made in a tmpfs of its own of that size, which is mounted nowhere and goes with
// it.
func MemoryFile(size uint64) (*os.File, error) {
	f, err := memoryFile(size, [2]string{"huge", "advise"})
	if err != nil { // a kernel without huge pages
		f, err = memoryFile(size)
	}
	if err != nil {
		return nil, fmt.Errorf("make memory for the area: %w", err)
	}
	return f, nil
}

func memoryFile(size uint64, options ...[2]string) (*os.File, error) {
	options = append(options, [2]string{"size", strconv.FormatUint(size, 10)}, [2]string{"mode", "0700"})
	mount, err := host.NewTmpfs(unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC, options...)
	if err != nil {
		return nil, err
	}
	defer unix.Close(mount)
	fd, err := unix.Openat(mount, ".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "gpuckpt-staging")
	if err := f.Truncate(int64(size)); err != nil { //nolint:gosec // no memory is as large
		f.Close()
		return nil, err
	}
	return f, nil
}
