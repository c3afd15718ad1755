// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package worker runs a child process that answers requests: this executable,
// started again under another name.
//
// The life of a Worker: Start starts the process, which touches nothing until it is
// asked. Each Call sends one request, a line of JSON on the worker's standard input,
// and waits for one answer, a line of JSON on its standard output. Calls take turns.
// Close ends the process; Kill ends it at once, whatever it does.
package worker

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// endTimeout bounds the wait for a worker that was told to end. It only has to
// return from main.
const endTimeout = 10 * time.Second

// callTimeout bounds one call. The longest copies or digests all GPU state:
// 30 minutes is 64 GiB at 40 MB/s.
const callTimeout = 30 * time.Minute

// Run starts a command and returns what waits for it, as cuda.Options.Run: a
// program that reaps all its children passes its reaper.
type Run func(*exec.Cmd) (wait func() (int, error), err error)

// Worker is a running worker process. A call that fails with the error gone of Start
// has lost the worker; Close is then all that is left to do.
type Worker struct {
	cmd    *exec.Cmd
	name   string
	gone   error
	stdin  io.WriteCloser
	lines  chan []byte // the answers; closed at the worker's end
	exited chan struct{}
	stderr tail

	mu sync.Mutex
}

// Start starts this executable as a worker of a name. cgroup, if it is not nil, is
// the directory of the cgroup (version 2) to start it in: to move it there takes the
// kernel some 20 ms. gone is the error of a call whose worker has ended.
func Start(name string, run Run, cgroup *os.File, gone error) (*Worker, error) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{name}
	cmd.Env = []string{} // it needs none, and GODEBUG and the like are not for it
	if cgroup != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(cgroup.Fd())}
	}
	w := &Worker{cmd: cmd, name: name, gone: gone, lines: make(chan []byte, 1), exited: make(chan struct{})}
	cmd.Stderr = &w.stderr
	cmd.WaitDelay = time.Second
	var err error
	if w.stdin, err = cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	wait, err := run(cmd)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		// The answers are read to their end before wait, which closes the pipe.
		r := bufio.NewReader(stdout)
		for {
			line, err := r.ReadBytes('\n')
			if err != nil {
				break
			}
			w.lines <- line
		}
		close(w.lines)
		_, _ = wait() // Close and the next call report how it ended
		close(w.exited)
	}()
	return w, nil
}

// Pid is the worker's process id.
func (w *Worker) Pid() int { return w.cmd.Process.Pid }

// Alive reports whether the worker is still there.
func (w *Worker) Alive() bool {
	select {
	case <-w.exited:
		return false
	default:
		return true
	}
}

// Kill ends the worker at once, whatever it does: a call under way fails with the
// error gone. Close is then still to be called.
func (w *Worker) Kill() {
	if w.Alive() {
		w.cmd.Process.Kill()
	}
}

// Close ends the worker. Its error is gone if the worker had ended before.
func (w *Worker) Close() error {
	var err error
	if !w.Alive() {
		err = w.ended()
	}
	w.stdin.Close()
	select {
	case <-w.exited:
	case <-time.After(endTimeout):
		w.cmd.Process.Kill()
		<-w.exited
	}
	return err
}

// Call sends a request and decodes the answer. doing begins the errors.
func (w *Worker) Call(doing string, request, answer any) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	line, err := json.Marshal(request)
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	if _, err := w.stdin.Write(append(line, '\n')); err != nil {
		<-w.exited // the pipe is closed by its end only
		return fmt.Errorf("%s: %w", doing, w.ended())
	}
	limit := time.NewTimer(callTimeout)
	defer limit.Stop()
	select {
	case line, ok := <-w.lines:
		if !ok {
			<-w.exited
			return fmt.Errorf("%s: %w", doing, w.ended())
		}
		if err := json.Unmarshal(line, answer); err != nil {
			return fmt.Errorf("%s: %s answered %q: %w", doing, w.name, line, err)
		}
		return nil
	case <-limit.C:
		w.cmd.Process.Kill()
		<-w.exited
		return fmt.Errorf("%s: took longer than %v: %w", doing, callTimeout, w.ended())
	}
}

// ended is gone and what the worker printed last.
func (w *Worker) ended() error {
	if said := w.stderr.String(); said != "" {
		return fmt.Errorf("%w: %s", w.gone, said)
	}
	return w.gone
}

// Is reports whether this process was started to be the worker of a name.
func Is(name string) bool {
	return len(os.Args) == 1 && os.Args[0] == name
}

// Serve is a worker's whole life: it answers the requests on standard input, one
// after the other, until the input ends.
func Serve(answer func(request []byte) any) {
	in := bufio.NewReader(os.Stdin)
	out := json.NewEncoder(os.Stdout)
	for {
		line, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			os.Exit(0)
		}
		if err == nil {
			err = out.Encode(answer(line))
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

// tail keeps the last bytes written to it.
type tail struct {
	mu  sync.Mutex
	end []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.end = append(t.end, p...)
	t.end = t.end[max(0, len(t.end)-1024):]
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.end))
}
