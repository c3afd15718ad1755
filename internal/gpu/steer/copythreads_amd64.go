// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/gpu/ptrace"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// How the copy threads work
//
// The driver moves GPU memory through a small buffer that the GPU reads and writes, 2 MiB at a
// time, and has the C library's memcpy copy between that and the staging area, on one thread. It
// asks for memcpy's oldest version (GLIBC_2.2.5), which knows of no processor later than SSE2, and
// whose loop goes backward where both addresses are pages: 6.5 GB/s on an H200's host, where the
// bus carries 55 (measured, driver 580; docs/results).
//
// The buffer can be reached from the driver's process only. So its memcpy is replaced there, while
// it works: the driver's library calls memcpy by a pointer in its table of functions (the PLT
// entry). The tracer makes that point to code of ours, copier/copier.S, in a page of its own. It
// copies past the cache, in slices that threads of ours in that process, the copy threads, take as
// well. A copy that is short, odd or overlapping goes to the memcpy that was there.
//
// The order keeps the process right at every instant: page, copy threads, PLT entry; then PLT
// entry, copy threads, page. A tracer that dies in between leaves a process with another memcpy;
// the copy threads end by themselves (patience), and callers do without them. The next tracer takes
// over what it finds.

//go:embed copier/copier.bin
var copierCode []byte

// Places in the page of code and in that of data behind it: copier/copier.S.
const (
	copierEntry = 768
	copierSwap  = 1024

	copierOriginal   = 4096
	copierGeneration = 4164
	copierCopied     = 4320
	copierStop       = 4356
	copierPatience   = 4360
	copierWas        = 4384
	copierMade       = 4392
	copierStacks     = 4096 + 1024 // one word each, in lines of their own
	copierTID        = 8           // behind that: its thread, until that has ended
	copierStackBytes = 64
	copierBytes      = 2 * staging.PageSize
	copierMost       = (copierBytes - copierStacks) / copierStackBytes
)

const (
	// idleSeconds is when a copy thread without work ends. The driver pauses longest
	// between two copies when it works on the next GPU, for well below a second.
	idleSeconds = 10
	// copyThreadsEnd bounds the wait for copy threads that were told to end, and for
	// threads in the middle of a copy, which takes less than a millisecond.
	copyThreadsEnd = 5 * time.Second
	// lookTwice is how long a running thread is not stopped: it may soon be seen waiting.
	lookTwice = 2 * time.Millisecond
)

// futexWakePrivate is FUTEX_WAKE_PRIVATE (include/uapi/linux/futex.h).
const futexWakePrivate = 1 | 128

// cloneFlags is how a copy thread is made: as the C library makes a thread, with nothing of its own
// but a word of stack. The kernel writes its number beside that before it runs, and zero when it
// runs no more: clone(2), CLONE_CHILD_CLEARTID.
const cloneFlags = unix.CLONE_VM | unix.CLONE_FS | unix.CLONE_FILES | unix.CLONE_SIGHAND | unix.CLONE_THREAD | unix.CLONE_SYSVSEM |
	unix.CLONE_PARENT_SETTID | unix.CLONE_CHILD_CLEARTID

// copyThreads are the threads of ours that help one process's driver to copy.
type copyThreads struct {
	step    func(string)
	pid     int
	page    uint64 // of code; 0 if there is nothing left to undo
	entry   uint64 // the PLT entry of memcpy
	swapped bool
	threads int // of ours
}

// newCopyThreads has the driver of the thread's process copy by as many threads, its own among
// them, or fewer. If the result is not nil the caller must stop it, also after an error.
func newCopyThreads(t *ptrace.Thread, threads int, step func(string)) (_ *copyThreads, err error) {
	entry, was, err := memcpyPLTEntry(t.PID, t.Mem)
	if err != nil {
		return nil, err
	}
	c := &copyThreads{step: step, pid: t.PID, entry: entry}
	if isCopierPage(t.Mem, was) {
		c.page, c.swapped = was, true
	} else if err := c.place(t, was); err != nil {
		return c, err
	}
	if err := c.tell(t, copierStop, 0); err != nil {
		return c, err
	}
	for range min(threads, MaxCopyThreads) - 1 {
		stack, err := c.stack(t)
		if err != nil {
			return c, err
		}
		if stack == 0 {
			break
		}
		if _, err := t.Syscall(unix.SYS_CLONE, cloneFlags, stack, stack+copierTID, stack+copierTID); err != nil {
			break // a limit, or a filter: with those there are
		}
		c.threads++
		c.step("copy thread made")
	}
	if !c.swapped {
		old, err := c.swap(t, c.page)
		if err != nil {
			return c, err
		}
		c.swapped = true
		if old != was {
			return c, fmt.Errorf("its memcpy was at %#x, then at %#x", was, old)
		}
	}
	c.step("memcpy replaced")
	return c, nil
}

// stack returns a stack that was never used, or 0: a copy thread that a dead tracer
// has left may be at work on its own stack. The new thread returns from its system
// call to the address on its stack.
func (c *copyThreads) stack(t *ptrace.Thread) (uint64, error) {
	made, err := t.Read64(c.page + copierMade)
	if err != nil {
		return 0, err
	}
	if made >= copierMost {
		return 0, nil
	}
	at := copierStacks + made*copierStackBytes
	if err := t.Write64(c.page+copierMade, made+1); err != nil {
		return 0, err
	}
	return c.page + at, t.Write64(c.page+at, c.page+copierEntry)
}

// isCopierPage reports whether our code is at an address, left by a tracer that died.
func isCopierPage(mem *os.File, at uint64) bool {
	code := make([]byte, len(copierCode))
	_, err := mem.ReadAt(code, int64(at))
	return err == nil && at%staging.PageSize == 0 && string(code) == string(copierCode)
}

// place makes the pages.
func (c *copyThreads) place(t *ptrace.Thread, original uint64) error {
	maps, err := proc.Maps(t.PID, proc.AllMappings)
	if err != nil {
		return err
	}
	page, err := t.Syscall(unix.SYS_MMAP, lonelyPlace(maps), copierBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, ^uint64(0))
	if err != nil {
		return fmt.Errorf("map a page of code: %w", err)
	}
	c.page = page
	c.step("copy threads' page mapped")
	data := make([]byte, copierBytes)
	copy(data, copierCode)
	binary.LittleEndian.PutUint64(data[copierOriginal:], original)
	binary.LittleEndian.PutUint64(data[copierPatience:], idleSeconds)
	if _, err := t.Mem.WriteAt(data, int64(page)); err != nil {
		return fmt.Errorf("write a page of code: %w", err)
	}
	if _, err := t.Syscall(unix.SYS_MPROTECT, page, staging.PageSize, unix.PROT_READ|unix.PROT_EXEC); err != nil {
		return fmt.Errorf("make a page executable: %w", err)
	}
	c.step("copy threads' code written")
	return nil
}

// swap exchanges the PLT entry's value, at once for all threads, by the thread itself.
func (c *copyThreads) swap(t *ptrace.Thread, value uint64) (old uint64, err error) {
	if _, err = t.RunCode(c.page+copierSwap, unix.SYS_GETPID, c.entry, value); err != nil {
		return 0, fmt.Errorf("replace its memcpy: %w", err)
	}
	return t.Read64(c.page + copierWas)
}

// stop undoes newCopyThreads by a thread of the process, which is in a stop; others may run.
func (c *copyThreads) stop(t *ptrace.Thread) error {
	if c == nil || c.page == 0 {
		return nil
	}
	if c.swapped {
		original, err := t.Read64(c.page + copierOriginal)
		if err != nil {
			return err
		}
		old, err := c.swap(t, original)
		if err != nil {
			return err
		}
		if old != c.page { // another's now: its business
			if _, err := c.swap(t, old); err != nil {
				return err
			}
			return fmt.Errorf("its memcpy was replaced meanwhile, by %#x", old)
		}
		c.swapped = false
		c.step("memcpy put back")
	}
	if err := c.leavePage(t); err != nil {
		return err
	}
	if err := c.tell(t, copierStop, 1); err != nil {
		return err
	}
	if err := c.await(func() error {
		// Each time, for one that was about to sleep.
		if _, err := t.Syscall(unix.SYS_FUTEX, c.page+copierGeneration, futexWakePrivate, 1<<30); err != nil {
			return fmt.Errorf("wake copy threads: %w", err)
		}
		return c.ended(t)
	}); err != nil {
		return err
	}
	c.step("copy threads ended")
	outside, began := map[int]bool{t.TID: true}, time.Now()
	if err := c.await(func() error { return c.vacant(outside, time.Since(began) > lookTwice) }); err != nil {
		return err
	}
	if _, err := t.Syscall(unix.SYS_MUNMAP, c.page, copierBytes); err != nil {
		return fmt.Errorf("unmap a page of code: %w", err)
	}
	c.page = 0
	c.step("copy threads' page unmapped")
	return nil
}

// note is a line for the log: how much the copy threads have copied.
func (c *copyThreads) note(t *ptrace.Thread) string {
	var copied uint64
	if c.page != 0 {
		copied, _ = t.Read64(c.page + copierCopied)
	}
	return fmt.Sprintf("process %d: %d bytes were copied for the driver, by %d threads", c.pid, copied, 1+c.threads)
}

func (c *copyThreads) within(at uint64) bool { return at-c.page < staging.PageSize }

// leavePage lets the thread go on until it is not in our code, where it does not come again.
func (c *copyThreads) leavePage(t *ptrace.Thread) error {
	for end := time.Now().Add(copyThreadsEnd); time.Now().Before(end); {
		if r, err := t.Registers(); err != nil || !c.within(r.Rip) {
			return err
		}
		if err := t.RunBriefly(); err != nil {
			return err
		}
	}
	return fmt.Errorf("thread %d does not leave the code of the copy threads", t.TID)
}

// errNotYet says that something has not come about, and what.
var errNotYet = errors.New("not yet")

// await asks until the answer is not errNotYet, for copyThreadsEnd.
func (c *copyThreads) await(ask func() error) error {
	for began := time.Now(); ; time.Sleep(50 * time.Microsecond) {
		if err := ask(); !errors.Is(err, errNotYet) || time.Since(began) > copyThreadsEnd {
			return err
		}
	}
}

// ended returns nil if no copy thread runs any more, those of dead tracers included.
func (c *copyThreads) ended(t *ptrace.Thread) error {
	made, err := t.Read64(c.page + copierMade)
	if err != nil {
		return err
	}
	for i := range min(made, copierMost) {
		tid, err := t.Read64(c.page + copierStacks + i*copierStackBytes + copierTID)
		if err != nil {
			return err
		}
		if tid != 0 {
			return fmt.Errorf("copy thread %d has %w ended", tid, errNotYet)
		}
	}
	return nil
}

// vacant returns nil if none of the process's threads is in our code, into which none
// comes any more. Those that were seen outside are in outside. If insist is set, a
// thread that runs is stopped to see where it is; otherwise it counts as inside.
func (c *copyThreads) vacant(outside map[int]bool, insist bool) error {
	tids, err := ptrace.Threads(c.pid)
	if err != nil {
		return err
	}
	for _, tid := range tids {
		if outside[tid] {
			continue
		}
		at, _, err := ptrace.Where(c.pid, tid, insist)
		switch {
		case errors.Is(err, ptrace.ErrEnded):
		case errors.Is(err, ptrace.ErrRunning):
			return fmt.Errorf("thread %d has %w stopped", tid, errNotYet)
		case err != nil:
			return err
		case c.within(at):
			return fmt.Errorf("thread %d has %w left the code of the copy threads", tid, errNotYet)
		}
		outside[tid] = true
	}
	return nil
}

// isCopyThread reports whether a thread, which does not run, is a copy thread: it is
// in a page of our code and its stack in the page behind, as that of no caller is.
// Held, a copy thread that a dead tracer has left could not end.
func isCopyThread(pid, tid int) bool {
	at, stack, err := ptrace.Where(pid, tid, false)
	page := at &^ (staging.PageSize - 1)
	if err != nil || stack-(page+copierStacks) >= copierBytes-copierStacks {
		return false
	}
	mem, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil {
		return false
	}
	defer mem.Close()
	return isCopierPage(mem, page)
}

func (c *copyThreads) tell(t *ptrace.Thread, what, value uint64) error {
	if _, err := t.Mem.WriteAt(binary.LittleEndian.AppendUint32(nil, uint32(value)), int64(c.page+what)); err != nil {
		return fmt.Errorf("write to the page of the copy threads: %w", err)
	}
	return nil
}

// copying is a process with copy threads, and its thread that makes system calls.
type copying struct {
	*copyThreads
	thread Thread
}

// startCopyThreads starts copy threads in all processes at once. The notes say where that failed.
func startCopyThreads(threads []Thread, n int, step func(string)) (all []copying, notes []string) {
	made := make([]*copyThreads, len(threads))
	errs := ptrace.InThreads(threads, step, func(i int, t *ptrace.Thread) (err error) {
		made[i], err = newCopyThreads(t, n, step)
		return err
	})
	for i, c := range made {
		if c != nil {
			all = append(all, copying{c, threads[i]})
		}
		if errs[i] != nil {
			notes = append(notes, fmt.Sprintf("the driver copies by itself: %v", errs[i]))
		}
	}
	return all, notes
}

// stopCopyThreads ends what startCopyThreads began, in all processes at once.
func stopCopyThreads(all []copying, step func(string)) (notes []string, err error) {
	var threads []Thread
	for _, c := range all {
		threads = append(threads, c.thread)
	}
	notes = make([]string, len(all))
	errs := ptrace.InThreads(threads, step, func(i int, t *ptrace.Thread) error {
		notes[i] = all[i].note(t)
		return all[i].stop(t)
	})
	return slices.DeleteFunc(notes, func(n string) bool { return n == "" }), errors.Join(errs...)
}
