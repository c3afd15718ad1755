// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Loosen makes sure that the threads of a frozen cgroup can be seized, by CRIU and by the tracer, also
// those of processes that a signal has stopped (SIGSTOP, Ctrl-Z). These are stopped when the cgroup is
// thawed, and no instruction of theirs runs before. On an error some may be loosened.
//
// PTRACE_SEIZE of a stopped thread waits until the thread has gone over into a stop for its tracer
// (JOBCTL_TRAPPING, kernel/ptrace.c). Frozen by version 1 it does not get there, and the wait has no end.
// So the stop of the whole process becomes a SIGSTOP that waits for the thaw: SIGCONT ends the stop, and
// SIGSTOP takes the SIGCONT back before anybody sees it. CRIU knows a process that is about to stop from
// one that runs. (Without the SIGSTOP in the queue it would wait for a second stop of a thread, as after
// an attach to one that is not frozen.) All that shows is that the parent hears of both.
//
// Version 2 lets a thread change its stop while it is frozen. There is nothing to do.
func (c *Cgroup) Loosen() error {
	if c.Unified() {
		return nil
	}
	pids, err := c.Pids()
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if !stopped(pid) {
			continue
		}
		for _, signal := range []unix.Signal{unix.SIGCONT, unix.SIGSTOP} {
			if err := proc.Signal(pid, signal, c.Has); err != nil {
				return fmt.Errorf("loosen the stopped process %s: %w", proc.Describe(pid), err)
			}
		}
	}
	return nil
}

func stopped(pid int) bool {
	tids, _ := proc.Threads(pid) // one that is gone has none
	for _, tid := range tids {
		status, err := proc.ThreadStatus(pid, tid)
		if err == nil && status.Tracer() == 0 && proc.Stopped(pid, tid) {
			return true
		}
	}
	return false
}
