// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package ptrace

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/proc"
)

// ThreadID names a thread of a process.
type ThreadID struct {
	PID int `json:"pid"`
	TID int `json:"tid"`
}

// ErrEnded says that a thread has ended, or is a zombie: it executes nothing.
var ErrEnded = errors.New("thread has ended")

// Seize attaches the calling thread to one thread, with the options of
// PTRACE_SEIZE, and asks it to stop. The end of the calling thread detaches.
func Seize(pid, tid, options int) error {
	var err error
	if _, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(tid), 0, uintptr(options), 0, 0); errno != 0 {
		err = errno
	} else if err = unix.PtraceInterrupt(tid); err == nil {
		return nil
	}
	if errors.Is(err, unix.ESRCH) {
		return ErrEnded
	}
	status, serr := proc.ThreadStatus(pid, tid)
	if proc.Ended(serr) || status.Ended() {
		return ErrEnded
	}
	if tracer := status.Tracer(); tracer != 0 {
		// The status names the thread that traces.
		if of, serr := proc.StatusOf(tracer); serr == nil {
			tracer = of.Process()
		}
		return fmt.Errorf("thread %d of process %d is traced by process %d (a debugger?): end it and try again", tid, pid, tracer)
	}
	return fmt.Errorf("seize thread %d of process %d: %w", tid, pid, err)
}
