// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Status is the text of a status file, lines of "Name:\tvalue", see
// proc_pid_status(5). The empty Status is one of which nothing is known.
type Status []byte

// StatusOf reads the status of a process, or of a thread by its id.
func StatusOf(pid int) (Status, error) {
	return os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
}

// ThreadStatus reads the status of one thread of a process.
func ThreadStatus(pid, tid int) (Status, error) {
	return os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/status", pid, tid))
}

// Field returns the value of a line, "" when there is no such line.
func (s Status) Field(name string) string {
	for line := range bytes.Lines(s) {
		if value, ok := bytes.CutPrefix(line, []byte(name+":")); ok {
			return string(bytes.TrimSpace(value))
		}
	}
	return ""
}

// Number returns the value of a line that is a number, 0 when it is none.
func (s Status) Number(name string) int {
	n, _ := strconv.Atoi(s.Field(name))
	return n
}

// Bytes returns the value of a line in kB, in bytes, 0 when it is none.
func (s Status) Bytes(name string) uint64 {
	n, _ := strconv.ParseUint(strings.TrimSuffix(s.Field(name), " kB"), 10, 54)
	return n << 10
}

// Ended reports whether the thread has ended: it is a zombie or about to go.
func (s Status) Ended() bool {
	state := s.Field("State")
	return strings.HasPrefix(state, "Z") || strings.HasPrefix(state, "X")
}

// Stopped reports whether a signal (SIGSTOP, Ctrl-Z) or a tracer has stopped a thread. A frozen cgroup of
// version 1 shows a thread that a signal has stopped as one that sleeps (D), and the place where it
// sleeps tells it: do_signal_stop, or get_signal in a kernel that has the one as a part of the other. It
// is false for a thread that has ended, and where the kernel names no places.
func Stopped(pid, tid int) bool {
	status, err := ThreadStatus(pid, tid)
	if err != nil {
		return false
	}
	switch state := status.Field("State"); {
	case strings.HasPrefix(strings.ToUpper(state), "T"):
		return true
	case !strings.HasPrefix(state, "D"):
		return false
	}
	place, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/wchan", pid, tid)) // of one that has ended there is none
	return strings.HasPrefix(string(place), "do_signal_stop") || strings.HasPrefix(string(place), "get_signal")
}

// ThreadName returns the name of a thread, as the program says; empty for one that has ended.
func ThreadName(pid, tid int) string {
	name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/comm", pid, tid))
	return strings.TrimSpace(string(name))
}

// Waiting says for which lock of the C library a thread waits, and which of its waits that is: as long as
// the text is the same it has not run. It is empty for a thread that waits for something else, or runs.
func Waiting(tid int) string {
	call, _ := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", tid)) // of one that has ended there is none
	// A lock that others wait for has the value 2 (glibc, nptl/lowlevellock.c). FUTEX_WAIT is 0, and 128
	// says that no other process has the lock (linux/futex.h).
	var number, at, operation, value uint64
	if n, _ := fmt.Sscanf(string(call), "%d 0x%x 0x%x 0x%x", &number, &at, &operation, &value); n < 4 || number != unix.SYS_FUTEX ||
		operation&^128 != 0 || value != 2 {
		return ""
	}
	status, err := StatusOf(tid)
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%#x %s", at, status.Field("voluntary_ctxt_switches"))
}

// Killed reports whether a SIGKILL waits for the thread. A thread in a frozen cgroup of version 1 has
// it until the cgroup is thawed.
func (s Status) Killed() bool {
	for _, name := range []string{"SigPnd", "ShdPnd"} {
		mask, _ := strconv.ParseUint(s.Field(name), 16, 64)
		if mask&(1<<(uint(syscall.SIGKILL)-1)) != 0 {
			return true
		}
	}
	return false
}

// TracingProcess returns the process that traces the thread, 0 for none: Tracer may be any thread of it.
func (s Status) TracingProcess() int {
	if of, err := StatusOf(s.Tracer()); err == nil && s.Tracer() != 0 {
		return of.Process()
	}
	return s.Tracer()
}

// Tracer returns the thread that traces the thread, 0 for none.
func (s Status) Tracer() int { return s.Number("TracerPid") }

// Process returns the process that the thread is of.
func (s Status) Process() int { return s.Number("Tgid") }

// Parent returns the parent of the process.
func (s Status) Parent() int { return s.Number("PPid") }

// ShimName is the file name of this project's shim.
const ShimName = "containerd-shim-gpuckpt-v2"

// Shim returns the shim of a container whose first process this is, and the file name of the shim's
// program; empty if it cannot be seen. Its arguments may be read without rights over it.
func (s Status) Shim() (pid int, program string) {
	if args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", s.Parent())); err == nil {
		path, _, _ := strings.Cut(string(args), "\x00")
		program = filepath.Base(path)
	}
	return s.Parent(), program
}

// NSPID returns the number of the process, or of the thread, in its innermost pid
// namespace.
func (s Status) NSPID() (int, error) {
	numbers := strings.Fields(s.Field("NSpid")) // one for each namespace, the innermost last
	if len(numbers) == 0 {
		return 0, errors.New("no line NSpid in the process's status")
	}
	pid, err := strconv.Atoi(numbers[len(numbers)-1])
	if err != nil || pid <= 0 {
		return 0, fmt.Errorf("no pid in %q", s.Field("NSpid"))
	}
	return pid, nil
}

// depth returns in how many pid namespaces the process has a number.
func (s Status) depth() int { return len(strings.Fields(s.Field("NSpid"))) }

// Inside returns, by their pids in the pid namespace of init, those of the listed processes that are
// in that namespace: CRIU is in the cgroup of a container that it restores, and not in its
// namespace.
func Inside(list func() ([]int, error), init int) (map[int]int, error) {
	pids, err := list()
	if err != nil {
		return nil, err
	}
	first, err := StatusOf(init)
	if err != nil {
		return nil, err
	}
	inside := make(map[int]int)
	for _, pid := range pids {
		status, err := StatusOf(pid)
		if err != nil || status.depth() < first.depth() {
			continue
		}
		if n, err := status.NSPID(); err == nil {
			inside[n] = pid
		}
	}
	return inside, nil
}

// ThreadInside finds a thread of a process by its number in the innermost pid namespace.
func ThreadInside(pid, inside int) (int, error) {
	tids, err := Threads(pid)
	if err != nil {
		return 0, err
	}
	for _, tid := range tids {
		status, err := ThreadStatus(pid, tid)
		if err != nil {
			continue
		}
		if n, err := status.NSPID(); err == nil && n == inside {
			return tid, nil
		}
	}
	return 0, fmt.Errorf("process %d has no thread %d", pid, inside)
}
