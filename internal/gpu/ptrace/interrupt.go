// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package ptrace

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// AwaitInterrupt waits until a thread has stopped because it was interrupted. A
// signal that comes first is delivered; it uses up the interrupt, so the thread is
// interrupted again.
func AwaitInterrupt(tid int) error {
	for {
		status, err := waitStop(tid)
		if err != nil {
			return err
		}
		if status>>16 == unix.PTRACE_EVENT_STOP {
			return nil
		}
		if err := unix.PtraceCont(tid, int(status.StopSignal())); err != nil {
			return fmt.Errorf("let thread %d go on: %w", tid, err)
		}
		if err := Interrupt(tid); err != nil {
			return err
		}
	}
}

// Interrupt asks a thread to stop. A thread that has ended is no error.
func Interrupt(tid int) error {
	if err := unix.PtraceInterrupt(tid); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("interrupt thread %d: %w", tid, err)
	}
	return nil
}

// waitStop waits for the thread's next stop. All other threads that the calling
// thread traces stand still, and report only that they were killed. That report is
// taken too: a process's first thread has not ended before all others are waited for.
func waitStop(tid int) (unix.WaitStatus, error) {
	for {
		var status unix.WaitStatus
		who, err := unix.Wait4(-1, &status, unix.WALL|unix.WNOTHREAD, nil)
		switch {
		case errors.Is(err, unix.EINTR), err == nil && who != tid:
			continue
		case err != nil:
			return 0, fmt.Errorf("wait for the thread: %w", err)
		case !status.Stopped():
			return 0, ErrEnded
		}
		return status, nil
	}
}
