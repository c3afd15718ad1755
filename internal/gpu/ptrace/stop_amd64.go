// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package ptrace

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// StopThread seizes a thread, waits until it stands still, and prepares system calls in it.
func StopThread(pid, tid int, step func(string)) (*Thread, error) {
	if err := Seize(pid, tid, unix.PTRACE_O_TRACESYSGOOD); err != nil {
		return nil, err
	}
	if err := AwaitInterrupt(tid); err != nil {
		return nil, err
	}
	return OpenThread(pid, tid, step)
}

// InThreads stops threads at once, calls do with each and its place in ids, and lets them go.
func InThreads(ids []ThreadID, step func(string), do func(i int, t *Thread) error) []error {
	errs := make([]error, len(ids))
	var all sync.WaitGroup
	for i, id := range ids {
		all.Go(func() {
			runtime.LockOSThread() // never unlocked: its end detaches
			t, err := StopThread(id.PID, id.TID, step)
			if err == nil {
				err = errors.Join(do(i, t), t.Detach())
				t.Close()
			}
			if err != nil {
				errs[i] = fmt.Errorf("process %d: %w", id.PID, err)
			}
		})
	}
	all.Wait()
	return errs
}

// Detach lets the thread go on, untraced.
func (t *Thread) Detach() error {
	if err := unix.PtraceDetach(t.TID); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("detach from thread %d: %w", t.TID, err)
	}
	return nil
}

// RunBriefly lets the thread, in a stop outside of a system call, run for an instant.
func (t *Thread) RunBriefly() error {
	if err := unix.PtraceCont(t.TID, 0); err != nil {
		return fmt.Errorf("go on: %w", err)
	}
	time.Sleep(200 * time.Microsecond)
	if err := unix.PtraceInterrupt(t.TID); err != nil {
		return fmt.Errorf("interrupt: %w", err)
	}
	return AwaitInterrupt(t.TID)
}

// SyscallStop is the signal of a stop at a system call, with PTRACE_O_TRACESYSGOOD.
const SyscallStop = unix.SIGTRAP | 0x80

// ErrRunning says that a thread runs, so that nobody knows where.
var ErrRunning = errors.New("thread runs")

// Where returns the address of a thread's next instruction and its stack pointer.
// See proc(5), /proc/PID/syscall: it ends in the two, unless the thread runs. If the
// thread runs, insist has it stopped for the answer; otherwise it is ErrRunning.
func Where(pid, tid int, insist bool) (at, stack uint64, err error) {
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/syscall", pid, tid))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return 0, 0, ErrEnded
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
		return 0, 0, ErrRunning
	}
	err = Seize(pid, tid, 0)
	if errors.Is(err, errHeldHere) {
		return 0, 0, ErrRunning // held, and not at its stop yet: on a busy machine it takes its time
	}
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = unix.PtraceDetach(tid) }() // or it ends, or this thread does
	if err := AwaitInterrupt(tid); err != nil {
		return 0, 0, err
	}
	var r unix.PtraceRegs
	if err := unix.PtraceGetRegs(tid, &r); err != nil {
		return 0, 0, err
	}
	return r.Rip, r.Rsp, nil
}

// Registers returns the thread's registers.
func (t *Thread) Registers() (r unix.PtraceRegs, err error) {
	if err := unix.PtraceGetRegs(t.TID, &r); err != nil {
		return r, fmt.Errorf("read registers: %w", err)
	}
	return r, nil
}

// SetRegisters sets the thread's registers.
func (t *Thread) SetRegisters(r *unix.PtraceRegs) error {
	if err := unix.PtraceSetRegs(t.TID, r); err != nil {
		return fmt.Errorf("set registers: %w", err)
	}
	return nil
}

// Read64 reads a word of the process's memory.
func (t *Thread) Read64(at uint64) (uint64, error) {
	b := make([]byte, 8)
	err := t.read(at, b)
	return binary.LittleEndian.Uint64(b), err
}

func (t *Thread) read(at uint64, b []byte) error {
	if _, err := t.Mem.ReadAt(b, int64(at)); err != nil {
		return fmt.Errorf("read %#x of process %d: %w", at, t.PID, err)
	}
	return nil
}

// Write64 writes a word of the process's memory.
func (t *Thread) Write64(at, value uint64) error {
	if _, err := t.Mem.WriteAt(binary.LittleEndian.AppendUint64(nil, value), int64(at)); err != nil {
		return fmt.Errorf("write %#x of process %d: %w", at, t.PID, err)
	}
	return nil
}
