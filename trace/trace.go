// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package trace holds the threads of processes still by ptrace, from a process
// of its own.
//
// The life of a hold: the threads are frozen by their cgroup; a tracer process
// seizes each (PTRACE_SEIZE) and asks it to stop (PTRACE_INTERRUPT); the cgroup
// is thawed, and each thread enters a ptrace stop before its next instruction
// in user space, while the threads that were left out run on; the cgroup is
// frozen again; the tracer ends, which makes the kernel let go of every thread.
// A tracer that crashes does the same, so no thread is ever left stopped.
//
// The tracer is a process because ptrace reports a stop the way it reports a
// child's end, by wait4 to the tracer: a containerd shim reaps whatever wait4
// gives it and would take a stop for an exit. It is the same executable,
// started again under the name TracerName: main calls Main first, see
// IsTracer.
package trace

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"
)

// TracerName is the name (argv[0]) under which an executable is a tracer.
const TracerName = "gpuckpt-tracer"

// ErrTracerGone says that the tracer ended before it was asked to: the threads
// it held have been let go.
var ErrTracerGone = errors.New("tracer process ended early; the threads it held run on")

// endTimeout bounds the wait for a tracer that was told to end. It only has to
// return from main; the kernel detaches the threads as it exits.
const endTimeout = 10 * time.Second

// order is what a tracer reads first on its standard input: one line of JSON.
type order struct {
	// Processes whose threads are held.
	Processes []int `json:"processes"`
	// Except are threads (of those processes) that are left alone.
	Except []int `json:"except"`
}

// Run starts a command and returns what waits for it, as cuda.Options.Run: a
// program that reaps all its children passes its reaper.
type Run func(*exec.Cmd) (wait func() (int, error), err error)

// Hold is a set of threads that are held.
type Hold struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	exited chan struct{}

	mu       sync.Mutex
	released bool
}

// Threads seizes every thread of the processes except those named, and returns
// once each has been asked to stop. The processes must be frozen by their
// cgroup: then each thread stops before it executes another instruction in
// user space when the cgroup is thawed. All pids and tids are as this process
// counts them.
//
// On an error nothing is held. A thread that another tracer (a debugger,
// strace, CRIU) has is an error that names it.
func Threads(ctx context.Context, run Run, processes, except []int) (*Hold, error) {
	line, err := json.Marshal(order{Processes: processes, Except: except})
	if err != nil {
		return nil, fmt.Errorf("hold threads: %w", err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{TracerName}
	cmd.Env = []string{} // it needs none, and GODEBUG and the like are not for it
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("hold threads: %w", err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("hold threads: %w", err)
	}
	wait, err := run(cmd)
	if err != nil {
		return nil, fmt.Errorf("hold threads: start the tracer: %w", err)
	}
	h := &Hold{cmd: cmd, stdin: stdin, exited: make(chan struct{})}
	answer := make(chan string, 1)
	go func() {
		// The answer is read to its end before wait, which closes the pipe.
		r := bufio.NewReader(stdout)
		s, _ := r.ReadString('\n')
		answer <- strings.TrimSpace(s)
		io.Copy(io.Discard, r)
		wait()
		close(h.exited)
	}()
	if _, err := stdin.Write(append(line, '\n')); err != nil {
		h.Release()
		return nil, fmt.Errorf("hold threads: %w", err)
	}
	select {
	case s := <-answer:
		if s == held {
			return h, nil
		}
		h.Release()
		if s == "" {
			return nil, fmt.Errorf("hold threads: %w", ErrTracerGone)
		}
		return nil, fmt.Errorf("hold threads: %s", s)
	case <-ctx.Done():
		h.Release()
		return nil, fmt.Errorf("hold threads: %w", ctx.Err())
	}
}

// Err is ErrTracerGone when the tracer has ended and nobody has called
// Release: the threads have run since they were last thawed.
func (h *Hold) Err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.released {
		return nil
	}
	select {
	case <-h.exited:
		return ErrTracerGone
	default:
		return nil
	}
}

// Release lets go of the threads, which run on unless their cgroup is frozen.
// It may be called more than once; only the first call reports. Its error is
// ErrTracerGone when the tracer had ended before.
func (h *Hold) Release() error {
	err := h.Err()
	h.mu.Lock()
	h.released = true
	h.mu.Unlock()
	h.stdin.Close()
	select {
	case <-h.exited:
	case <-time.After(endTimeout):
		h.cmd.Process.Kill()
		<-h.exited
	}
	return err
}

// IsTracer says whether this process was started to be a tracer: main then
// calls Main and nothing else.
func IsTracer() bool {
	return len(os.Args) == 1 && os.Args[0] == TracerName
}
