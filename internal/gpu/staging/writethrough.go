// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package staging

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/mmapfile"
)

// MinWindow is the least memory, in bytes, through which a process's state is written.
const MinWindow = config.MinBuffer

const (
	windowChunks = 16                   // of a window
	lookEvery    = 2 * time.Millisecond // between two looks at the driver
	pagemapPages = 8192                 // that one look reads: 64 KiB, for 32 MiB of memory
)

// WriteThrough bounds the memory of an area whose file is on a disk. This process puts pages into
// the page cache ahead of the driver, so its cgroup pays for them. It writes what is well behind
// the driver, and takes that out of the process and out of the cache. The pages between are at most
// the window: the driver's thread is held while the disk is slower.
//
// The content is right in any case: the process has the file mapped, shared.
type WriteThrough struct {
	b      *File
	pid    int
	window uint64

	touched atomic.Uint64 // in the file: the driver has been up to here; 0 before it begins
	flushed atomic.Uint64 // all before it is on the disk and out of memory
	// undropped is why pages stay in the cache for now; set at the end of filling.
	undropped error
}

// Reserve makes a file with room on its disk: to write to a page without room is a fatal signal.
func Reserve(path string, size uint64) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make a file for the area: %w", err)
	}
	if err := allocate(f, size); err != nil {
		f.Close()
		_ = os.Remove(path)
		return nil, err
	}
	return f, nil
}

func allocate(f *os.File, size uint64) error {
	err := uninterrupted(func() error { return unix.Fallocate(int(f.Fd()), 0, 0, int64(size)) })
	if errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("the file system of %s cannot reserve room, so GPU state cannot be written through to it: %w", f.Name(), err)
	}
	if err != nil {
		return fmt.Errorf("reserve %d bytes for %s: %w", size, f.Name(), err)
	}
	return nil
}

func syncRange(fd int, from, length uint64, how int) error {
	return uninterrupted(func() error { return unix.SyncFileRange(fd, int64(from), int64(length), how) })
}

// uninterrupted makes a system call again that a signal has interrupted. Go's scheduler sends this
// program signals, and some file systems, a tmpfs for one, break a long call off for any.
func uninterrupted(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// NewWriteThrough makes a reserved file that of an area of a process, whose memory is at most the
// window. It returns when the first part is filled. On an error the file is gone.
func (fl *Filler) NewWriteThrough(f *os.File, pid int, window, start, length uint64) (*File, error) {
	b := fl.newFile(f.Name(), start, length)
	b.Handle = f
	b.chunk = window / windowChunks &^ (PageSize - 1)
	t := &WriteThrough{b: b, pid: pid, window: window}
	b.through = t
	err := allocate(f, b.size)
	if err == nil {
		err = f.Truncate(int64(b.size)) // more may have been reserved
	}
	if err != nil {
		close(b.filled)
		b.Remove()
		return nil, err
	}
	go func() {
		defer close(b.filled)
		b.err = t.run()
	}()
	if err := b.AwaitFilled(t.lead()); err != nil {
		b.Remove()
		return nil, err
	}
	return b, nil
}

// lead is what is filled of an area that the driver has not begun: it may fill others first.
func (t *WriteThrough) lead() uint64 { return 2 * t.b.chunk }

// run goes on until all is written, the backing is cancelled, or something fails.
func (t *WriteThrough) run() error {
	mem, unmap, err := mmapfile.File(t.b.Handle, t.b.size, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		return fmt.Errorf("map the file: %w", err)
	}
	defer unmap()
	// Otherwise each fault reads ahead, on some file systems by megabytes.
	if err := unix.Madvise(mem, unix.MADV_RANDOM); err != nil {
		return fmt.Errorf("map the file: %w", err)
	}
	pages, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", t.pid))
	if err != nil {
		return err
	}
	defer pages.Close()
	pidfd, err := unix.PidfdOpen(t.pid, 0)
	if err != nil {
		return fmt.Errorf("open process %d: %w", t.pid, err)
	}
	defer unix.Close(pidfd)
	var all errgroup.Group
	for _, do := range []func() error{
		func() error { return t.look(pages) },
		func() error { return t.fill(mem) },
		func() error { return t.flush(pidfd) },
	} {
		all.Go(func() error {
			err := do()
			if err != nil {
				t.b.cancel.Store(true) // ends all that goes on
			}
			return err
		})
	}
	return all.Wait()
}

// look updates touched, by the highest bit, "present", of the 8 bytes of a page
// (Documentation/admin-guide/mm/pagemap.rst). If the driver leaves something out, a look further on
// finds it.
func (t *WriteThrough) look(pages *os.File) error {
	RaisePriority()
	b := t.b
	buf := make([]byte, 8*pagemapPages)
	end := b.Offset + b.Length
	elsewhere := uint64(0)
	for !b.cancel.Load() && t.touched.Load() < end {
		for {
			to, err := t.lastPresent(pages, buf, max(t.touched.Load(), b.Offset))
			if err != nil {
				return err
			}
			if to == 0 {
				break
			}
			t.touched.Store(to)
		}
		if elsewhere <= t.touched.Load() || elsewhere >= end {
			elsewhere = max(t.touched.Load(), b.Offset) + pagemapPages*PageSize
		}
		if to, err := t.lastPresent(pages, buf, elsewhere); err != nil {
			return err
		} else if to > t.touched.Load() {
			t.touched.Store(to)
		}
		elsewhere += pagemapPages * PageSize
		time.Sleep(lookEvery)
	}
	return nil
}

// RaisePriority locks the calling goroutine to its thread, which ends with it, and has the kernel
// schedule that thread before others: what bounds memory must be quicker than what fills it.
func RaisePriority() {
	runtime.LockOSThread()
	_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), -20)
}

// lastPresent returns the end of the last page that the process has in its memory, of those that
// one look reads from an offset in the file on; 0 if there is none.
func (t *WriteThrough) lastPresent(pages *os.File, buf []byte, from uint64) (uint64, error) {
	b := t.b
	if from >= b.Offset+b.Length {
		return 0, nil
	}
	n := min(uint64(len(buf)), (b.Offset+b.Length-from)/PageSize*8)
	if _, err := pages.ReadAt(buf[:n], int64((b.Start+from-b.Offset)/PageSize*8)); err != nil {
		return 0, fmt.Errorf("read the pages of process %d: %w", t.pid, err)
	}
	for i := n; i > 0; i -= 8 {
		if binary.NativeEndian.Uint64(buf[i-8:])>>63 != 0 {
			return from + i/8*PageSize, nil
		}
	}
	return 0, nil
}

// fill puts pages into the cache, up to a window from what is written.
func (t *WriteThrough) fill(mem []byte) error {
	b := t.b
	for from := uint64(0); from < b.size && !b.cancel.Load(); {
		ahead := t.lead()
		if t.touched.Load() > 0 {
			ahead = t.window
		}
		if from+b.chunk > t.flushed.Load()+ahead {
			time.Sleep(lookEvery)
			continue
		}
		if err := b.filler.Fill(from); err != nil {
			return fmt.Errorf("fill %d bytes for the area: %w", b.size, err)
		}
		to := min(from+b.chunk, b.size)
		err := inThreads(runtime.NumCPU(), to-from, max(PageSize, b.chunk/uint64(runtime.NumCPU())&^(PageSize-1)), func(i, j uint64) error {
			return mmapfile.Populate(mem[from+i : from+j])
		})
		if err != nil {
			return fmt.Errorf("fill %d bytes for the area: %w", b.size, err)
		}
		// Pages that are mapped here would not leave the cache.
		if err := unix.Madvise(mem[from:to], unix.MADV_DONTNEED); err != nil {
			return fmt.Errorf("unmap what is filled: %w", err)
		}
		b.advance(from)
		b.filler.Step("part filled")
		from = to
	}
	return nil
}

// flush writes what the driver has left behind, and takes it out of memory. If it cannot be written, the process
// is killed: the kernel may drop pages that it could not write (ext4 does), and nobody else has what is in them.
func (t *WriteThrough) flush(pidfd int) error {
	err := t.flushAll(pidfd)
	if err == nil {
		return nil
	}
	_ = unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0) // or it has ended
	return fmt.Errorf("write %s: %w: the disk has lost GPU memory of process %d, which is therefore killed", t.b.name, err, t.pid)
}

func (t *WriteThrough) flushAll(pidfd int) error {
	b := t.b
	fd := int(b.Handle.Fd())
	for started := uint64(0); t.flushed.Load() < b.size && !b.cancel.Load(); {
		from := t.flushed.Load()
		for started < t.passed() && started < from+t.window/4 { // the disk is to have enough to do
			if err := syncRange(fd, started, b.chunk, unix.SYNC_FILE_RANGE_WRITE); err != nil {
				return err
			}
			started += b.chunk
		}
		if from >= started {
			time.Sleep(lookEvery)
			continue
		}
		const all = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
		if err := syncRange(fd, from, b.chunk, all); err != nil {
			return err
		}
		b.filler.Step("part written")
		t.drop(pidfd, from, min(from+b.chunk, b.size))
		b.filler.Step("part dropped")
		t.flushed.Store(from + b.chunk)
	}
	return nil
}

// passed returns how much of the file, in whole chunks, the driver has well behind it.
func (t *WriteThrough) passed() uint64 {
	b := t.b
	at := t.touched.Load()
	if at >= b.Offset+b.Length {
		return b.size
	}
	return (at - min(at, 2*b.chunk)) / b.chunk * b.chunk
}

// drop takes written pages out of the process and out of the cache, but for those that were changed
// since. MADV_PAGEOUT never changes memory's content (process_madvise(2), Linux 5.10).
func (t *WriteThrough) drop(pidfd int, from, to uint64) {
	b := t.b
	first, last := max(from, b.Offset), min(to, b.Offset+b.Length)
	if first < last {
		v := unix.RemoteIovec{Base: uintptr(b.Start + first - b.Offset), Len: int(last - first)}
		if _, _, errno := unix.Syscall6(unix.SYS_PROCESS_MADVISE, uintptr(pidfd), uintptr(unsafe.Pointer(&v)), 1, unix.MADV_PAGEOUT, 0, 0); errno != 0 {
			t.undropped = fmt.Errorf("what is written stays in the page cache until the kernel wants its room: %w", errno)
		}
	}
	_ = unix.Fadvise(int(b.Handle.Fd()), int64(from), int64(to-from), unix.FADV_DONTNEED) // advice
}

// WriteThrough returns what bounds the memory of a file on a disk, nil for one in memory.
func (b *File) WriteThrough() *WriteThrough { return b.through }

// Undropped returns, after Wait, why pages stay in the page cache; nil if they do not.
func (t *WriteThrough) Undropped() error { return t.undropped }

// Failed returns why no more is written, nil while nothing has failed.
func (t *WriteThrough) Failed() error {
	select {
	case <-t.b.filled:
		return t.b.err
	default:
		return nil
	}
}

// Near reports whether the driver's thread must be stopped: too much behind it is not written yet,
// or what is before it is not filled.
func (t *WriteThrough) Near() bool {
	select {
	case <-t.b.filled:
		return t.b.err != nil
	default:
	}
	frontier, _ := t.b.FilledTo()
	at := t.touched.Load()
	return at > t.flushed.Load()+t.window/2 || at > 0 && frontier < min(at+t.b.chunk, t.b.size)
}

// Await waits until a thread for which Near was true can go on.
func (t *WriteThrough) Await() error {
	for {
		select {
		case <-t.b.filled:
			return t.b.err
		default:
		}
		frontier, _ := t.b.FilledTo()
		at := t.touched.Load()
		if at <= t.flushed.Load()+t.window/4 && frontier >= min(at+t.lead(), t.b.size) {
			return nil
		}
		time.Sleep(lookEvery)
	}
}
