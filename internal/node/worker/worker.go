// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package worker runs a child process that answers requests, and is the one way in which a program
// of this module talks to a child of its own.
//
// The life of a Worker: Start starts the process, with one end of a socket pair as its file
// descriptor 3. Each Call sends one request and waits for the answer with the same number; any
// number of calls may be under way. The process ends by itself when this end of the socket closes,
// so it does not outlive its parent by more than the requests that it has. Close ends it and waits
// for that. Kill ends it at once.
//
// No call hangs. Each has a limit, of its time or of the time in which nothing moves; when it passes,
// the process is killed: that call fails with
// Kind.Hung, those beside it and all later ones with the same error. If the process ends by itself,
// calls fail with Kind.Gone, which quotes its exit status and its last words. An answer that makes
// no sense is Kind.Garbled, and the process is killed as well.
//
// The other side is a Server. A message is a frame of a length, a number and a value in JSON, and may
// carry open files. Both sides are of one build, so anything unknown in it is refused rather than
// guessed at.
package worker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/fault"
)

const (
	// reapTimeout bounds the end of a process; only one stuck in the kernel takes longer.
	reapTimeout = 10 * time.Second
	// sendTimeout bounds the writing of a request. The socket takes hundreds of small
	// ones; a process that lets them pile up hangs.
	sendTimeout = 10 * time.Second
)

// Kind is what all workers of a kind have in common.
type Kind struct {
	// Name is for errors: "CUDA helper".
	Name string
	// Self is the argv[0] of those that StartSelf starts.
	Self string
	// Gone, Hung and Garbled are the errors of calls, see the package.
	Gone, Hung, Garbled error
	// MaxMessage bounds a message, in bytes.
	MaxMessage int
	// Drain is how long Close waits for calls under way. 0 waits no longer for them.
	Drain time.Duration
}

// Run starts a command and returns what waits for its exit status (128 + N for signal N). A program
// that reaps all its children, as containerd's shims do, passes its reaper.
type Run func(*exec.Cmd) (wait func() (int, error), err error)

// Worker is a running worker process.
type Worker struct {
	kind   Kind
	cmd    *exec.Cmd
	sock   *os.File
	stderr tail
	exited chan struct{} // closed once reaped; status is then set
	status string
	down   chan struct{} // closed once no answer can come; err is then set

	sending sync.Mutex
	mu      sync.Mutex
	last    uint64
	calls   map[uint64]*call
	closed  bool
	err     error
}

type call struct {
	answer  chan Message // of capacity 1
	dropped bool         // nobody waits for the answer; under Worker.mu
	limit   *time.Timer  // kills the process
}

// Start starts a command as a worker. A nil run is exec.Cmd's Start and Wait.
func Start(kind Kind, cmd *exec.Cmd, run Run) (*Worker, error) {
	if run == nil {
		run = StartAndWait
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make the socket of the %s: %w", kind.Name, err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "worker's socket")
	defer theirs.Close()
	if err := unix.SetNonblock(fds[0], true); err != nil { // so that deadlines work
		unix.Close(fds[0])
		return nil, fmt.Errorf("set up the socket of the %s: %w", kind.Name, err)
	}
	w := &Worker{
		kind: kind, cmd: cmd, sock: os.NewFile(uintptr(fds[0]), kind.Name),
		exited: make(chan struct{}), down: make(chan struct{}), calls: make(map[uint64]*call),
	}
	cmd.Stderr = &w.stderr
	cmd.ExtraFiles = []*os.File{theirs} // becomes FD
	cmd.WaitDelay = time.Second         // for the pipe of its standard error
	wait, err := run(cmd)
	if err != nil {
		w.sock.Close()
		return nil, fmt.Errorf("start the %s %s: %w", kind.Name, cmd.Path, err)
	}
	go func() {
		code, err := wait()
		w.status = describe(code, err)
		close(w.exited)
	}()
	go w.read()
	return w, nil
}

// StartSelf starts this executable as a worker: its Args are Kind.Self alone, and its
// environment is empty. If cgroup is not nil, it is the directory of the cgroup
// (version 2) to start it in: to move it there takes the kernel some 20 ms.
func StartSelf(kind Kind, run Run, cgroup *os.File) (*Worker, error) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{kind.Self}
	cmd.Env = fault.Env() // it needs none, and GODEBUG and the like are not for it
	if cgroup != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(cgroup.Fd())}
	}
	return Start(kind, cmd, run)
}

// IsSelf reports whether StartSelf has started this process as a worker of the kind.
func (k Kind) IsSelf() bool { return len(os.Args) == 1 && os.Args[0] == k.Self }

// Pid is the worker's process id.
func (w *Worker) Pid() int { return w.cmd.Process.Pid }

// Done returns a channel that is closed when the process has ended and is reaped.
func (w *Worker) Done() <-chan struct{} { return w.exited }

// Alive reports whether the worker still answers, as far as is known without asking it.
func (w *Worker) Alive() bool {
	select {
	case <-w.exited:
		return false
	case <-w.down:
		return false
	default:
		return true
	}
}

// Pending is the number of calls that wait for their answers.
func (w *Worker) Pending() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.calls)
}

// Kill ends the process at once: calls fail with Kind.Gone. The caller must still call Close.
func (w *Worker) Kill() {
	if w.Alive() {
		w.cmd.Process.Kill()
	}
}

// Close ends the process and reaps it. It waits 10 s for that, or Kind.Drain while a call is under
// way whose context has ended, and then kills it. It may be called twice, also at once. Its error
// says that the process had to be killed or could not be reaped; either way it is of no more use.
func (w *Worker) Close() error {
	w.mu.Lock()
	closed := w.closed
	w.closed = true
	patience := reapTimeout
	if len(w.calls) > 0 {
		patience = max(patience, w.kind.Drain)
	}
	w.mu.Unlock()
	if !closed {
		// The process sees the end of its requests, finishes those it has, and exits.
		// An error means that the socket is gone, and so is the process.
		if conn, err := w.sock.SyscallConn(); err == nil {
			_ = conn.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_WR) })
		}
	}
	err := w.reap(patience)
	w.fail(fmt.Errorf("%s: %w", w.kind.Name, os.ErrClosed))
	w.sock.Close()
	return err
}

func (w *Worker) reap(patience time.Duration) error {
	if w.ends(patience) {
		return nil
	}
	w.cmd.Process.Kill()
	if w.ends(reapTimeout) {
		return fmt.Errorf("close the %s: did not end within %v and was killed", w.kind.Name, patience)
	}
	return fmt.Errorf("close the %s: process %d could not be killed", w.kind.Name, w.Pid())
}

func (w *Worker) ends(within time.Duration) bool {
	select {
	case <-w.exited:
		return true
	case <-time.After(within):
		return false
	}
}

// Limit is how long a process may take to answer before it is killed.
type Limit struct {
	// Most is how long in all.
	Most time.Duration
	// Still is how long it may take while Moved returns the same number; 0: as long as Most.
	Still time.Duration
	// Moved returns a number that changes while the process is at work, and false where it cannot be
	// told, which counts as work. It is called some times within Still.
	Moved func() (count uint64, known bool)
}

// Call sends a request, waits for its answer and decodes it into answer. doing begins the errors.
// limit is how long the process may take before it is killed.
//
// When the context ends, Call returns its error at once. The process goes on, and drops its answer.
func (w *Worker) Call(ctx context.Context, doing string, request, answer any, limit Limit) error {
	files, err := w.CallFiles(ctx, doing, request, nil, answer, limit)
	closeAll(files)
	return err
}

// CallFiles is Call that sends open files, at most MaxFiles, with the request. The process gets
// files of its own. The files that come with the answer are the caller's; after an error there are
// none.
func (w *Worker) CallFiles(ctx context.Context, doing string, request any, send []*os.File, answer any, limit Limit) (got []*os.File, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s: %w", doing, err)
		}
	}()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	body, err := encode(request, w.kind.MaxMessage)
	if err != nil {
		return nil, err
	}
	if len(send) > MaxFiles {
		return nil, fmt.Errorf("a message with %d files has more than %d", len(send), MaxFiles)
	}
	c := &call{answer: make(chan Message, 1)}
	if err := w.send(c, body, send, doing, limit); err != nil {
		return nil, err
	}
	select {
	case m := <-c.answer:
		return w.decode(m, answer)
	case <-ctx.Done():
		w.drop(c)
		return nil, ctx.Err()
	case <-w.down:
	}
	select {
	case m := <-c.answer: // it came just before the process went
		return w.decode(m, answer)
	default:
		return nil, w.err
	}
}

// drop gives up the answer of a call.
func (w *Worker) drop(c *call) {
	w.mu.Lock()
	defer w.mu.Unlock()
	c.dropped = true
	select {
	case m := <-c.answer:
		m.Close()
	default:
	}
}

// decode reads an answer. One that makes no sense is the end of the process.
func (w *Worker) decode(m Message, answer any) ([]*os.File, error) {
	if err := Decode(m.Body, answer); err != nil {
		m.Close()
		err = fmt.Errorf("%w: %w", w.kind.Garbled, err)
		w.fail(err)
		return nil, err
	}
	return m.Files, nil
}

// send makes a call known to read, starts its limit and writes its request.
func (w *Worker) send(c *call, body []byte, files []*os.File, doing string, limit Limit) error {
	w.sending.Lock() // requests arrive in the order of their calls
	defer w.sending.Unlock()
	id, err := w.register(c, doing, limit)
	if err != nil {
		return err
	}
	if err = w.sock.SetWriteDeadline(time.Now().Add(sendTimeout)); err == nil {
		err = writeFrame(w.sock, id, body, files)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		w.fail(fmt.Errorf("%w: it takes no requests", w.kind.Hung))
	}
	// Any other error means that the process is gone, or that Close was quicker.
	// Whoever noticed says why: read at the end of the socket.
	return nil
}

func (w *Worker) register(c *call, doing string, limit Limit) (id uint64, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return 0, fmt.Errorf("%s: %w", w.kind.Name, os.ErrClosed)
	}
	if w.err != nil {
		return 0, w.err
	}
	w.last++
	id = w.last
	w.calls[id] = c
	if limit.Still <= 0 {
		c.limit = time.AfterFunc(limit.Most, func() { w.fail(w.late(doing, limit.Most)) })
		return id, nil
	}
	began := time.Now()
	since, count := began, uint64(0)
	c.limit = time.AfterFunc(limit.Still/looks, func() {
		now, known := limit.Moved()
		switch at := time.Now(); {
		case at.Sub(began) >= limit.Most:
			w.fail(w.late(doing, limit.Most))
			return
		case !known || now != count:
			since, count = at, now
		case at.Sub(since) >= limit.Still:
			w.fail(fmt.Errorf("%w: nothing has moved for %v in %s", w.kind.Hung, limit.Still, doing))
			return
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.calls[id] == c {
			c.limit.Reset(limit.Still / looks)
		}
	})
	return id, nil
}

// looks is how often it is looked within Limit.Still whether something has moved.
const looks = 8

func (w *Worker) late(doing string, limit time.Duration) error {
	return fmt.Errorf("%w: %s took longer than %v", w.kind.Hung, doing, limit)
}

// fail ends all calls with err and kills the process. Only the first counts.
func (w *Worker) fail(err error) {
	w.mu.Lock()
	first := w.err == nil
	if first {
		w.err = err
		for _, c := range w.calls {
			c.limit.Stop()
		}
		w.calls = nil
		close(w.down)
	}
	w.mu.Unlock()
	if first {
		w.cmd.Process.Kill() // an error means that it is gone already
	}
}

// read hands each answer to its call, until there are no more.
func (w *Worker) read() {
	for {
		m, err := readFrame(w.sock, w.kind.MaxMessage)
		if errors.Is(err, errFrame) {
			w.fail(fmt.Errorf("%w: %w", w.kind.Garbled, err))
			return
		}
		if err != nil {
			w.lost()
			return
		}
		w.mu.Lock()
		c := w.calls[m.ID]
		delete(w.calls, m.ID)
		if c == nil || c.dropped {
			m.Close()
		} else {
			c.answer <- m
		}
		w.mu.Unlock()
		if c == nil {
			w.fail(fmt.Errorf("%w: answer %d to no request", w.kind.Garbled, m.ID))
			return
		}
		c.limit.Stop()
	}
}

// lost ends all calls because the process closed its end: it is exiting, or has.
func (w *Worker) lost() {
	if !w.ends(2 * time.Second) { // closed its socket and lives: not ours any more
		w.cmd.Process.Kill()
		if !w.ends(reapTimeout) {
			w.fail(fmt.Errorf("%w: its socket is closed", w.kind.Gone))
			return
		}
	}
	err := fmt.Errorf("%w (%s)", w.kind.Gone, w.status)
	if said := w.stderr.String(); said != "" {
		err = fmt.Errorf("%w: %s", err, said)
	}
	w.fail(err)
}
