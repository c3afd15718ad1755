// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trace

import (
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// How the driver copies faster than it can
//
// The driver moves GPU memory through a small buffer that the GPU reads and
// writes, 2 MiB at a time, and has the C library's memcpy copy between that and
// the staging area, on one thread. It asks for memcpy's oldest version
// (GLIBC_2.2.5), which knows of no processor later than SSE2, and whose loop
// goes backward where both addresses are pages: 6.5 GB/s on an H200's host,
// where the bus carries 55 (measured, driver 580; docs/results).
//
// The buffer can be reached from the driver's process only. So its memcpy is
// replaced there, while it works: the driver's library finds memcpy by a pointer
// in its table of functions (the slot), and that is made to point to code of
// ours, copier/copier.S, in a page of its own. It copies past the cache, in
// slices that threads of ours in that process, the copiers, take as well. A copy
// that is short, odd or overlapping goes to the memcpy that was there.
//
// The order keeps the process right at every instant: page, copiers, slot; then
// slot, copiers, page. A tracer that dies in between leaves a process with
// another memcpy; the copiers end by themselves (patience), and the callers do
// without. The next tracer takes over what it finds.

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
	copierBytes      = 2 * pageSize
	copierMost       = (copierBytes - copierStacks) / copierStackBytes
)

const (
	// idleSeconds is when a copier without work ends. The driver's longest pause
	// between two copies is its work on the next GPU, well below a second.
	idleSeconds = 10
	// copiersEnd bounds the wait for copiers that were told to end, and for threads
	// in the middle of a copy, which takes less than a millisecond.
	copiersEnd = 5 * time.Second
	// lookTwice is for how long a thread that runs is left to itself, in the hope of
	// seeing it where it does not.
	lookTwice = 2 * time.Millisecond
)

// futexWakePrivate is FUTEX_WAKE_PRIVATE (include/uapi/linux/futex.h).
const futexWakePrivate = 1 | 128

// copierThread is how a copier is made: as the C library makes a thread, with
// nothing of its own but a word of stack. The kernel writes its number beside that
// before it runs, and zero when it runs no more: clone(2), CLONE_CHILD_CLEARTID.
const copierThread = unix.CLONE_VM | unix.CLONE_FS | unix.CLONE_FILES | unix.CLONE_SIGHAND | unix.CLONE_THREAD | unix.CLONE_SYSVSEM |
	unix.CLONE_PARENT_SETTID | unix.CLONE_CHILD_CLEARTID

// copiers are what helps one process's driver to copy.
type copiers struct {
	pid     int
	page    uint64 // of code; 0 when there is nothing left to undo
	slot    uint64
	swapped bool
	threads int // of ours
}

// quicken has the driver of the thread's process copy by as many threads, its own
// among them. What it returns is to be undone, also after an error, if it is not
// nil. Fewer copiers than asked for are no error.
func (t *thread) quicken(threads int) (_ *copiers, err error) {
	slot, was, err := memcpySlot(t.pid, t.mem)
	if err != nil {
		return nil, err
	}
	c := &copiers{pid: t.pid, slot: slot}
	if found := copierPage(t.mem, was); found {
		c.page, c.swapped = was, true
	} else if err := c.place(t, was); err != nil {
		return c, err
	}
	if err := c.tell(t, copierStop, 0); err != nil {
		return c, err
	}
	for range min(threads, MaxCopiers) - 1 {
		stack, err := c.stack(t)
		if err != nil {
			return c, err
		}
		if stack == 0 {
			break
		}
		if _, err := t.plain(unix.SYS_CLONE, copierThread, stack, stack+copierTID, stack+copierTID); err != nil {
			break // a limit, or a filter: with those there are
		}
		c.threads++
		step("copier made")
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
	step("memcpy replaced")
	return c, nil
}

// stack gives one that was never given out, or 0: a copier that a dead tracer has
// left may be at work on its own. The new thread returns from its system call to
// what the stack says.
func (c *copiers) stack(t *thread) (uint64, error) {
	made, err := t.read64(c.page + copierMade)
	if err != nil {
		return 0, err
	}
	if made >= copierMost {
		return 0, nil
	}
	at := copierStacks + made*copierStackBytes
	if err := t.write64(c.page+copierMade, made+1); err != nil {
		return 0, err
	}
	return c.page + at, t.write64(c.page+at, c.page+copierEntry)
}

// copierPage says whether an address of a process's memory is that of our code, left
// there by a tracer that died.
func copierPage(mem *os.File, at uint64) bool {
	code := make([]byte, len(copierCode))
	_, err := mem.ReadAt(code, int64(at))
	return err == nil && at%pageSize == 0 && string(code) == string(copierCode)
}

// place makes the pages.
func (c *copiers) place(t *thread, original uint64) error {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", t.pid))
	if err != nil {
		return err
	}
	page, err := t.plain(unix.SYS_MMAP, lonelyPlace(string(maps)), copierBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, ^uint64(0))
	if err != nil {
		return fmt.Errorf("map a page of code: %w", err)
	}
	c.page = page
	step("copiers' page mapped")
	data := make([]byte, copierBytes)
	copy(data, copierCode)
	binary.LittleEndian.PutUint64(data[copierOriginal:], original)
	binary.LittleEndian.PutUint64(data[copierPatience:], idleSeconds)
	if _, err := t.mem.WriteAt(data, int64(page)); err != nil {
		return fmt.Errorf("write a page of code: %w", err)
	}
	if _, err := t.plain(unix.SYS_MPROTECT, page, pageSize, unix.PROT_READ|unix.PROT_EXEC); err != nil {
		return fmt.Errorf("make a page executable: %w", err)
	}
	step("copiers' code written")
	return nil
}

// lonelyPlace gives an address for a mapping that is far from all others: in the
// middle of the largest gap between two. Left alone the kernel would put it into
// the first hole that is large enough. That may be one that the driver has made,
// and will fill again, at that address, or unmap together with what is around it.
func lonelyPlace(maps string) (at uint64) {
	below, largest := uint64(0), uint64(0)
	for line := range strings.Lines(maps) {
		start, end, ok := addresses(line)
		if !ok || start < below || start >= 1<<47 { // the kernel's, above
			break
		}
		if gap := start - below; below > 0 && gap > largest {
			largest, at = gap, (below+gap/2)&^(hugePage-1)
		}
		below = end
	}
	return at
}

// swap exchanges the slot's value, at once for all threads, by the thread itself.
func (c *copiers) swap(t *thread, value uint64) (old uint64, err error) {
	_, err = t.run(c.page+copierSwap, unix.SYS_GETPID, func(uint64) ([]byte, [6]uint64) {
		return nil, [6]uint64{c.slot, value}
	})
	if err != nil {
		return 0, fmt.Errorf("replace its memcpy: %w", err)
	}
	return t.read64(c.page + copierWas)
}

// undo takes out what quicken has put in. The thread is one of the process's, in
// a stop; others may run.
func (c *copiers) undo(t *thread) error {
	if c == nil || c.page == 0 {
		return nil
	}
	if c.swapped {
		original, err := t.read64(c.page + copierOriginal)
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
			return fmt.Errorf("process %d: its memcpy was replaced meanwhile, by %#x", c.pid, old)
		}
		c.swapped = false
		step("memcpy put back")
	}
	if err := c.leavePage(t); err != nil {
		return err
	}
	if err := c.tell(t, copierStop, 1); err != nil {
		return err
	}
	if err := c.await(func() error {
		// Each time, for one that was about to sleep.
		if _, err := t.plain(unix.SYS_FUTEX, c.page+copierGeneration, futexWakePrivate, 1<<30); err != nil {
			return fmt.Errorf("wake copiers: %w", err)
		}
		return c.ended(t)
	}); err != nil {
		return err
	}
	step("copiers ended")
	outside, began := map[int]bool{t.tid: true}, time.Now()
	if err := c.await(func() error { return c.vacant(outside, time.Since(began) > lookTwice) }); err != nil {
		return err
	}
	if _, err := t.plain(unix.SYS_MUNMAP, c.page, copierBytes); err != nil {
		return fmt.Errorf("unmap a page of code: %w", err)
	}
	c.page = 0
	step("copiers' page unmapped")
	return nil
}

// note says for the log what it was good for.
func (c *copiers) note(t *thread) string {
	var copied uint64
	if c.page != 0 {
		copied, _ = t.read64(c.page + copierCopied)
	}
	return fmt.Sprintf("process %d: %d bytes were copied for the driver, by %d threads", c.pid, copied, 1+c.threads)
}

// within says whether an address is in the page of code.
func (c *copiers) within(at uint64) bool { return at-c.page < pageSize }

// leavePage lets the thread go on until it is not in our code, where it does not
// come again.
func (c *copiers) leavePage(t *thread) error {
	for end := time.Now().Add(copiersEnd); time.Now().Before(end); {
		var r unix.PtraceRegs
		if err := unix.PtraceGetRegs(t.tid, &r); err != nil {
			return fmt.Errorf("read registers: %w", err)
		}
		if !c.within(r.Rip) {
			return nil
		}
		if err := t.goOn(); err != nil {
			return err
		}
	}
	return fmt.Errorf("process %d: thread %d does not leave the copiers' code", c.pid, t.tid)
}

// goOn lets the thread, which is in a stop outside of a system call, run for an
// instant.
func (t *thread) goOn() error {
	if err := unix.PtraceCont(t.tid, 0); err != nil {
		return fmt.Errorf("go on: %w", err)
	}
	time.Sleep(200 * time.Microsecond)
	if err := unix.PtraceInterrupt(t.tid); err != nil {
		return fmt.Errorf("interrupt: %w", err)
	}
	return awaitInterrupt(t.tid)
}

// errNotYet says that something has not come about, and what.
var errNotYet = errors.New("not yet")

// await asks until the answer is no longer that it is not so yet, for copiersEnd.
func (c *copiers) await(ask func() error) error {
	for began := time.Now(); ; time.Sleep(50 * time.Microsecond) {
		err := ask()
		if err == nil {
			return nil
		}
		if !errors.Is(err, errNotYet) || time.Since(began) > copiersEnd {
			return fmt.Errorf("process %d: %w", c.pid, err)
		}
	}
}

// ended says that no copier runs any more, those of dead tracers neither.
func (c *copiers) ended(t *thread) error {
	made, err := t.read64(c.page + copierMade)
	if err != nil {
		return err
	}
	for i := range min(made, copierMost) {
		tid, err := t.read64(c.page + copierStacks + i*copierStackBytes + copierTID)
		if err != nil {
			return err
		}
		if tid != 0 {
			return fmt.Errorf("copier %d has %w ended", tid, errNotYet)
		}
	}
	return nil
}

// vacant says that none of the process's threads is in our code, into which none
// comes any more. Those that were seen outside are in outside. A thread that runs is
// stopped to see where it is, if insist is set; else it counts as being there.
func (c *copiers) vacant(outside map[int]bool, insist bool) error {
	tids, err := threads(c.pid)
	if err != nil {
		return err
	}
	for _, tid := range tids {
		if outside[tid] {
			continue
		}
		at, _, err := whereabouts(c.pid, tid, insist)
		switch {
		case errors.Is(err, errEnded):
		case err != nil:
			return err
		case c.within(at):
			return fmt.Errorf("thread %d has %w left the copiers' code", tid, errNotYet)
		}
		outside[tid] = true
	}
	return nil
}

// whereabouts gives the address of a thread's next instruction and its stack
// pointer. See proc(5), /proc/PID/syscall: it ends in the two, unless the thread runs.
func whereabouts(pid, tid int, insist bool) (at, stack uint64, err error) {
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/syscall", pid, tid))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return 0, 0, errEnded
	}
	if err != nil {
		return 0, 0, err
	}
	if words := strings.Fields(string(line)); len(words) > 2 {
		at, aerr := strconv.ParseUint(words[len(words)-1], 0, 64)
		stack, serr := strconv.ParseUint(words[len(words)-2], 0, 64)
		if aerr != nil || serr != nil {
			return 0, 0, fmt.Errorf("thread %d: /proc says %q", tid, line)
		}
		return at, stack, nil
	}
	if !insist {
		return 0, 0, fmt.Errorf("thread %d has %w stopped", tid, errNotYet)
	}
	if err := seize(pid, tid, 0); err != nil {
		return 0, 0, err
	}
	defer func() { _ = unix.PtraceDetach(tid) }() // or it ends, or this thread does
	if err := awaitInterrupt(tid); err != nil {
		return 0, 0, err
	}
	var r unix.PtraceRegs
	if err := unix.PtraceGetRegs(tid, &r); err != nil {
		return 0, 0, err
	}
	return r.Rip, r.Rsp, nil
}

// isCopier says whether a thread, which does not run, is a copier: it is in a page
// of our code and its stack in the page behind, as that of no caller is.
func isCopier(pid, tid int) bool {
	at, stack, err := whereabouts(pid, tid, false)
	page := at &^ (pageSize - 1)
	if err != nil || stack-(page+copierStacks) >= copierBytes-copierStacks {
		return false
	}
	mem, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil {
		return false
	}
	defer mem.Close()
	return copierPage(mem, page)
}

func (c *copiers) tell(t *thread, what, value uint64) error {
	if _, err := t.mem.WriteAt(binary.LittleEndian.AppendUint32(nil, uint32(value)), int64(c.page+what)); err != nil {
		return fmt.Errorf("write to the copiers' page: %w", err)
	}
	return nil
}

func (t *thread) read64(at uint64) (uint64, error) {
	b := make([]byte, 8)
	if _, err := t.mem.ReadAt(b, int64(at)); err != nil {
		return 0, fmt.Errorf("read %#x of process %d: %w", at, t.pid, err)
	}
	return binary.LittleEndian.Uint64(b), nil
}

func (t *thread) write64(at, value uint64) error {
	if _, err := t.mem.WriteAt(binary.LittleEndian.AppendUint64(nil, value), int64(at)); err != nil {
		return fmt.Errorf("write %#x of process %d: %w", at, t.pid, err)
	}
	return nil
}
