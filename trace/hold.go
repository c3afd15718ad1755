// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// hold is a thread of the tracer and all the threads it has seized.
type hold struct {
	end chan struct{} // closed to let go
	tid int           // the tracer's own thread
}

// holdThreads seizes until a pass over all the processes finds no thread that
// is new: frozen processes make none, so the second pass is the last.
func holdThreads(processes, except []int) (*hold, error) {
	h := &hold{end: make(chan struct{})}
	seized := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this function
		h.tid = unix.Gettid()
		err := seizeAll(processes, except)
		seized <- err
		if err == nil {
			h.reap()
		}
	}()
	if err := <-seized; err != nil {
		waitThread(h.tid)
		return nil, err
	}
	return h, nil
}

// reapEvery is the time between two looks for held threads that have ended.
const reapEvery = 10 * time.Millisecond

// reap takes note of held threads that end, until they are let go. A process that
// is killed is not gone before its tracers have done so for each thread. In that of
// a container's first process the kernel even waits for all others, in the thread
// that ends last (kernel/pid_namespace.c, zap_pid_ns_processes): that may be the one
// which is not held, and which a step here waits for.
func (h *hold) reap() {
	look := time.NewTicker(reapEvery)
	defer look.Stop()
	for {
		for {
			var status unix.WaitStatus
			tid, err := unix.Wait4(-1, &status, unix.WALL|unix.WNOTHREAD|unix.WNOHANG, nil)
			if err != nil || tid == 0 { // ECHILD: all have ended
				break
			}
		}
		select {
		case <-h.end:
			return
		case <-look.C:
		}
	}
}

// waitThread waits until a thread of this process is gone: by then the kernel
// has detached all that it traced.
func waitThread(tid int) {
	for {
		if _, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", tid)); err != nil {
			return
		}
		time.Sleep(50 * time.Microsecond)
	}
}

// release ends the thread. The kernel then detaches every thread it had seized,
// those that have not stopped yet as well, which PTRACE_DETACH would refuse.
func (h *hold) release() {
	close(h.end)
	waitThread(h.tid)
}

func seizeAll(processes, except []int) error {
	done := make(map[int]bool)
	for _, tid := range except {
		done[tid] = true
	}
	for {
		fresh := false
		for _, pid := range processes {
			tids, err := threads(pid)
			if err != nil {
				return err
			}
			for _, tid := range tids {
				if done[tid] {
					continue
				}
				if isCopier(pid, tid) { // a dead tracer's, held it could not end
					done[tid] = true
					continue
				}
				if err := seize(pid, tid, 0); err != nil && !errors.Is(err, errEnded) {
					return err
				}
				done[tid], fresh = true, true
			}
		}
		if !fresh {
			return nil
		}
	}
}

// threads lists a process's threads; one that has ended has none. A listing that a
// thread ends in may lack one that lives on: the kernel finds the next from the last
// (fs/proc/base.c, next_tid), or counts anew. One that is like that before it lacks
// none.
func threads(pid int) ([]int, error) {
	var before []int
	for range 1000 {
		tids, err := listThreads(pid)
		if err != nil || len(tids) == 0 || slices.Equal(tids, before) {
			return tids, err
		}
		before = tids
	}
	return nil, fmt.Errorf("the threads of process %d come and go too fast to be listed: try again", pid)
}

func listThreads(pid int) ([]int, error) {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the threads of process %d: %w", pid, err)
	}
	var tids []int
	for _, e := range entries {
		tid, err := strconv.Atoi(e.Name())
		if err != nil {
			return nil, fmt.Errorf("list the threads of process %d: %w", pid, err)
		}
		tids = append(tids, tid)
	}
	return tids, nil
}

// errEnded says that a thread has ended, or is a zombie: it executes nothing.
var errEnded = errors.New("thread has ended")

// seize attaches to one thread and asks it to stop.
func seize(pid, tid, options int) error {
	_, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(tid), 0, uintptr(options), 0, 0)
	var err error
	if errno != 0 {
		err = errno
	} else {
		err = unix.PtraceInterrupt(tid)
	}
	if err == nil {
		return nil
	}
	if errors.Is(err, unix.ESRCH) {
		return errEnded
	}
	status, rerr := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/status", pid, tid))
	if errors.Is(rerr, os.ErrNotExist) || errors.Is(rerr, unix.ESRCH) {
		return errEnded
	}
	if state := field(status, "State:"); len(state) > 0 && (state[0] == 'Z' || state[0] == 'X') {
		return errEnded
	}
	if tracer := field(status, "TracerPid:"); tracer != "" && tracer != "0" {
		// The line names the thread that traces.
		if of, rerr := os.ReadFile("/proc/" + tracer + "/status"); rerr == nil {
			tracer = field(of, "Tgid:")
		}
		return fmt.Errorf("thread %d of process %d is traced by process %s (a debugger?): end it and try again", tid, pid, tracer)
	}
	return fmt.Errorf("seize thread %d of process %d: %w", tid, pid, err)
}

// field gives the value of a line "NAME:\tvalue" of /proc/PID/status.
func field(status []byte, name string) string {
	for line := range bytes.Lines(status) {
		if rest, ok := bytes.CutPrefix(line, []byte(name)); ok {
			return string(bytes.TrimSpace(rest))
		}
	}
	return ""
}
