// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// held is the tracer's answer once every thread is seized.
const held = "held"

// Main is a tracer's whole life: it reads its order, seizes the threads,
// answers "held" or what went wrong, and ends when its standard input does.
func Main() {
	// ptrace belongs to the thread that seized; it must be one and live on.
	runtime.LockOSThread()
	in := bufio.NewReader(os.Stdin)
	if err := serve(in); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(held)
	io.Copy(io.Discard, in)
	// The kernel detaches every thread as this process ends, those that have
	// not stopped yet as well, which PTRACE_DETACH would refuse.
	os.Exit(0)
}

func serve(in *bufio.Reader) error {
	line, err := in.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("read the order: %w", err)
	}
	o, err := parseOrder(line)
	if err != nil {
		return err
	}
	return seizeAll(o)
}

func parseOrder(line []byte) (order, error) {
	var o order
	dec := json.NewDecoder(bytes.NewReader(line))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&o); err != nil {
		return order{}, fmt.Errorf("order: %w", err)
	}
	for _, id := range append(o.Processes, o.Except...) {
		if id <= 0 {
			return order{}, fmt.Errorf("order: %d is no process or thread", id)
		}
	}
	return o, nil
}

// seizeAll seizes until a pass over all the processes finds no thread that is
// new: frozen processes make none, so the second pass is the last.
func seizeAll(o order) error {
	done := make(map[int]bool)
	for _, tid := range o.Except {
		done[tid] = true
	}
	for {
		fresh := false
		for _, pid := range o.Processes {
			tids, err := threads(pid)
			if err != nil {
				return err
			}
			for _, tid := range tids {
				if done[tid] {
					continue
				}
				if err := seize(pid, tid); err != nil {
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

// threads lists a process's threads; one that has ended has none.
func threads(pid int) ([]int, error) {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if errors.Is(err, os.ErrNotExist) {
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

// seize attaches to one thread and asks it to stop. A thread that has ended,
// or is a zombie, executes nothing and is passed over.
func seize(pid, tid int) error {
	err := unix.PtraceSeize(tid)
	if err == nil {
		err = unix.PtraceInterrupt(tid)
	}
	if err == nil || errors.Is(err, unix.ESRCH) {
		return nil
	}
	status, rerr := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/status", pid, tid))
	if errors.Is(rerr, os.ErrNotExist) || errors.Is(rerr, unix.ESRCH) {
		return nil
	}
	if state := field(status, "State:"); len(state) > 0 && (state[0] == 'Z' || state[0] == 'X') {
		return nil
	}
	if tracer := field(status, "TracerPid:"); tracer != "" && tracer != "0" {
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
