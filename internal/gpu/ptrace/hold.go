// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package ptrace

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Hold is a thread of this process and all the threads that it has seized.
type Hold struct {
	end    chan struct{}   // closed to let go
	breath chan breath     // whose end is told by its done
	tid    int             // this process's own thread
	seized map[int]*seized // for the holding thread alone
}

// seized is a thread that is held.
type seized struct {
	pid   int
	still bool // it does not run in a breath: it is not to, or a signal of the program's own has stopped it
}

// breath is a call of Breathe.
type breath struct {
	pid  int
	most time.Duration
	over func() bool
	done chan struct{}
}

// Choice reports whether a thread of a process is chosen. A nil Choice chooses none.
type Choice func(pid, tid int) bool

func (c Choice) chooses(pid, tid int) bool { return c != nil && c(pid, tid) }

// HoldThreads seizes every thread of the processes, and asks each to stop. It leaves out those in
// except and those that leave chooses. Breathe runs none that still chooses. HoldThreads looks again until it
// finds no new thread: frozen processes make none, so the second look is the last. An error holds none.
func HoldThreads(processes, except []int, leave, still Choice) (*Hold, error) {
	h := &Hold{end: make(chan struct{}), breath: make(chan breath), seized: make(map[int]*seized)}
	began := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this function
		h.tid = unix.Gettid()
		err := h.seizeAll(processes, except, leave, still)
		began <- err
		if err == nil {
			h.reap()
		}
	}()
	if err := <-began; err != nil {
		waitThread(h.tid)
		return nil, err
	}
	return h, nil
}

// reapEvery is the time between two looks for held threads that have ended.
const reapEvery = 10 * time.Millisecond

// reap waits for held threads that end, until all are let go. A killed process is not gone before
// its tracers have waited for each of its threads. If it is a container's first process, the thread
// that ends last, maybe one that is not held and that a caller waits for, waits in the kernel for
// all others (kernel/pid_namespace.c, zap_pid_ns_processes).
func (h *Hold) reap() {
	look := time.NewTicker(reapEvery)
	defer look.Stop()
	for {
		h.hear(nil)
		select {
		case <-h.end:
			return
		case b := <-h.breath:
			h.run(b)
			close(b.done)
		case <-look.C:
		}
	}
}

// Breathe has the held threads of one process run until over returns true, for most at most, and asks them
// to stop again. What they make meanwhile, threads or children, is held. It must not be called beside Release.
func (h *Hold) Breathe(pid int, most time.Duration, over func() bool) {
	b := breath{pid, most, over, make(chan struct{})}
	h.breath <- b
	<-b.done
}

// run is Breathe, in the holding thread.
func (h *Hold) run(b breath) {
	h.hear(nil)
	for tid, s := range h.seized {
		if s.pid == b.pid && !s.still {
			_ = unix.PtraceCont(tid, 0) // one that has not stopped yet is heard below
		}
	}
	end := time.Now().Add(b.most)
	over := func() bool { return b.over() || !time.Now().Before(end) }
	for ; !over(); time.Sleep(b.most / 20) {
		h.hear(func(s *seized) bool { return s.pid == b.pid && !over() })
	}
	for tid, s := range h.seized {
		if s.pid == b.pid {
			_ = unix.PtraceInterrupt(tid) // or it has ended
		}
	}
}

// hear takes what the held threads have to tell until there is no more. It continues those for which run, if
// not nil, returns true.
func (h *Hold) hear(run func(*seized) bool) {
	for {
		var status unix.WaitStatus
		tid, err := unix.Wait4(-1, &status, unix.WALL|unix.WNOTHREAD|unix.WNOHANG, nil)
		if err != nil || tid == 0 { // ECHILD: all have ended
			return
		}
		if !status.Stopped() {
			delete(h.seized, tid)
			continue
		}
		s := h.seized[tid]
		if s == nil { // made in a breath
			s = &seized{still: true}
			h.seized[tid] = s
		}
		switch int(status) >> 16 {
		case 0: // a signal came in a breath: the thread has it, and stops after that, as it was asked to
			_ = unix.PtraceCont(tid, int(status.StopSignal()))
			continue
		case unix.PTRACE_EVENT_STOP:
			s.still = s.still || status.StopSignal() != unix.SIGTRAP
		}
		if run != nil && !s.still && run(s) {
			_ = unix.PtraceCont(tid, 0)
		}
	}
}

// waitThread waits until a thread of this process is gone, and has let go of its own.
func waitThread(tid int) {
	for {
		if _, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", tid)); err != nil {
			return
		}
		time.Sleep(50 * time.Microsecond)
	}
}

// Release ends the holding thread. The kernel then detaches every thread that it
// had seized. PTRACE_DETACH would refuse those that have not stopped yet.
func (h *Hold) Release() {
	close(h.end)
	waitThread(h.tid)
}

func (h *Hold) seizeAll(processes, except []int, leave, still Choice) error {
	done := make(map[int]bool)
	for _, tid := range except {
		done[tid] = true
	}
	for {
		fresh := false
		for _, pid := range processes {
			tids, err := Threads(pid)
			if err != nil {
				return err
			}
			for _, tid := range tids {
				if done[tid] {
					continue
				}
				if leave.chooses(pid, tid) {
					done[tid] = true
					continue
				}
				if err := Seize(pid, tid, New); err != nil && !errors.Is(err, ErrEnded) {
					return err
				}
				h.seized[tid] = &seized{pid, still.chooses(pid, tid)}
				done[tid], fresh = true, true
			}
		}
		if !fresh {
			return nil
		}
	}
}

// Threads lists the threads of a process; one that has ended has none. If a thread ends during the
// listing, that may lack another that lives on: the kernel finds the next thread from the last one
// (fs/proc/base.c, next_tid), or counts anew. Two equal listings in a row lack none.
func Threads(pid int) ([]int, error) {
	var before []int
	for range 1000 {
		tids, err := proc.Threads(pid)
		if proc.Ended(err) {
			return nil, nil
		}
		if err != nil || len(tids) == 0 || slices.Equal(tids, before) {
			return tids, err
		}
		before = tids
	}
	return nil, fmt.Errorf("the threads of process %d come and go too fast to be listed: try again", pid)
}

// ThreadID names a thread of a process.
type ThreadID struct {
	PID int `json:"pid"`
	TID int `json:"tid"`
}

// New is the option of PTRACE_SEIZE by which new threads and children of a thread are seized as well, by
// the same tracer, before their first instruction, and stand still.
const New = unix.PTRACE_O_TRACECLONE | unix.PTRACE_O_TRACEFORK | unix.PTRACE_O_TRACEVFORK

// ErrEnded says that a thread has ended, or is a zombie: it executes nothing.
var ErrEnded = errors.New("thread has ended")

// errHeldHere says that another thread of this process traces a thread.
var errHeldHere = errors.New("this process traces it already")

// Seize attaches the calling thread to one thread, with the options of
// PTRACE_SEIZE, and asks it to stop. The end of the calling thread detaches.
//
// A thread that is not one of the process's is an error: whoever named it may be wrong, or its
// number may have become another's. It is then left as it was.
func Seize(pid, tid, options int) error {
	if err := isThread(pid, tid); err != nil {
		return err
	}
	var err error
	if _, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(tid), 0, uintptr(options), 0, 0); errno != 0 {
		err = errno
	} else if err = unix.PtraceInterrupt(tid); err == nil {
		// From here on its number cannot become another's.
		if err := isThread(pid, tid); err != nil {
			_ = AwaitInterrupt(tid)
			_ = unix.PtraceDetach(tid) // or it has ended
			return err
		}
		return nil
	}
	if errors.Is(err, unix.ESRCH) {
		return ErrEnded
	}
	status, serr := proc.ThreadStatus(pid, tid)
	if proc.Ended(serr) || status.Ended() {
		return ErrEnded
	}
	if tracer := status.TracingProcess(); tracer != 0 {
		if tracer == os.Getpid() {
			return fmt.Errorf("seize thread %d of process %d: %w", tid, pid, errHeldHere)
		}
		return fmt.Errorf("thread %d of process %d is traced by process %d (a debugger?): end it and try again", tid, pid, tracer)
	}
	return fmt.Errorf("seize thread %d of process %d: %w", tid, pid, err)
}

// isThread refuses a thread that is not one of the process's. The error is ErrEnded if there is no
// such thread at all.
func isThread(pid, tid int) error {
	if _, err := os.Stat(fmt.Sprintf("/proc/%d/task/%d", pid, tid)); err == nil {
		return nil
	}
	status, err := proc.StatusOf(tid)
	if proc.Ended(err) || err == nil && status.Process() == pid {
		return ErrEnded
	}
	if err != nil {
		return err
	}
	return fmt.Errorf("thread %d is of process %d, not of process %d", tid, status.Process(), pid)
}
