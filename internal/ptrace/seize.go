// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package ptrace

import (
	"bytes"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrEnded says that a thread has ended, or is a zombie: it executes nothing.
var ErrEnded = errors.New("thread has ended")

// Seize attaches the calling thread to one thread, with the options of
// PTRACE_SEIZE, and asks it to stop. The end of the calling thread detaches.
func Seize(pid, tid, options int) error {
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
		return ErrEnded
	}
	status, rerr := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/status", pid, tid))
	if errors.Is(rerr, os.ErrNotExist) || errors.Is(rerr, unix.ESRCH) {
		return ErrEnded
	}
	if state := field(status, "State:"); len(state) > 0 && (state[0] == 'Z' || state[0] == 'X') {
		return ErrEnded
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

// field returns the value of a line "NAME:\tvalue" of /proc/PID/status.
func field(status []byte, name string) string {
	for line := range bytes.Lines(status) {
		if rest, ok := bytes.CutPrefix(line, []byte(name)); ok {
			return string(bytes.TrimSpace(rest))
		}
	}
	return ""
}
