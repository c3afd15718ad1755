// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
)

// reapTimeout bounds the wait for a helper that was asked to end or was killed.
// Only a process stuck in the kernel takes longer.
const reapTimeout = 10 * time.Second

// drainTimeout is how long the helper continues its calls after its client has gone
// (package driver), and some time to exit.
const drainTimeout = 2*time.Minute + reapTimeout

// Helper is a running gpuckpt-cuda-helper. It initialises the driver with its
// first call (45 to 520 ms on real hardware), answers any number of concurrent
// calls, and ends with Close. Keep one for a whole operation: while it runs the
// driver stays initialised.
//
// No call hangs. Each has a limit (Options); when it passes, the helper is
// killed and the call answers ErrHelperHung, those beside it ErrHelperGone. A
// helper that dies or is killed is ErrHelperGone, with its exit status and the
// end of what it printed. What a call that ended so did to its process is
// unknown: ask State of a new Helper.
//
// A context that ends makes the call return at once with the context's error,
// but the driver cannot be called back: the call goes on in the helper, and
// later calls for the same process wait for its end. So undoing after a
// cancelled call needs no more than to ask State and act. The helper is not
// killed, because a driver call whose caller dies midway may leave the process
// out of step with the driver (checkpoint-restore/criu#2547).
//
// The helper ends by itself when this end of its socket closes, so it does not
// outlive this program by more than the driver calls under way (2 min at most).
// It is not tied to the thread that started it: Go ends threads at will.
type Helper struct {
	opts   Options
	cmd    *exec.Cmd
	sock   *os.File
	stderr *tail
	exited chan struct{} // closed once reaped; status is then set
	status string
	down   chan struct{} // closed once no reply can come; err is then set

	mu     sync.Mutex
	lastID uint64
	calls  map[uint64]*call
	closed bool
	err    error
}

// call is a request that waits for its reply.
type call struct {
	reply chan wire.Reply // of capacity 1
	limit *time.Timer     // kills the helper
}

// Start starts a helper. The first call reports whether there is a driver. The
// context only bounds Start itself.
func Start(ctx context.Context, opts Options) (*Helper, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("start CUDA helper: %w", err)
	}
	opts = opts.withDefaults()
	cmd, err := opts.command()
	if err != nil {
		return nil, err
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make CUDA helper's socket: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "helper's socket")
	defer theirs.Close()
	if err := unix.SetNonblock(fds[0], true); err != nil { // so that deadlines work
		unix.Close(fds[0])
		return nil, fmt.Errorf("set up CUDA helper's socket: %w", err)
	}
	h := &Helper{
		opts:   opts,
		cmd:    cmd,
		sock:   os.NewFile(uintptr(fds[0]), "CUDA helper"),
		stderr: &tail{also: opts.Stderr},
		exited: make(chan struct{}),
		down:   make(chan struct{}),
		calls:  make(map[uint64]*call),
	}
	cmd.Stderr = h.stderr
	cmd.ExtraFiles = []*os.File{theirs} // becomes wire.FD
	// A process group of its own: Ctrl-C in a terminal must not end a driver
	// call midway.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = time.Second // for the pipe of its standard error
	wait, err := opts.Run(cmd)
	if err != nil {
		h.sock.Close()
		return nil, fmt.Errorf("start CUDA helper %s: %w", cmd.Path, err)
	}
	go func() {
		code, err := wait()
		h.status = describe(code, err)
		close(h.exited)
	}()
	go h.read()
	return h, nil
}

// Alive reports whether the helper still answers, as far as is known without asking it.
func (h *Helper) Alive() bool {
	select {
	case <-h.exited:
		return false
	case <-h.down:
		return false
	default:
		return true
	}
}

// Close ends the helper and reaps it. It waits 10 s for that, or 2 min while a
// call is under way whose context has ended, and then kills it. It may be called
// twice, also at once. Its error reports that the helper had to be killed or could
// not be reaped; either way it is of no more use.
func (h *Helper) Close() error {
	h.mu.Lock()
	closed := h.closed
	h.closed = true
	patience := reapTimeout
	if len(h.calls) > 0 {
		patience = drainTimeout
	}
	h.mu.Unlock()
	if !closed {
		// The helper sees the end of its requests, finishes those it has, and exits.
		// An error means that the socket is gone, and so is the helper.
		if conn, err := h.sock.SyscallConn(); err == nil {
			_ = conn.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_WR) })
		}
	}
	err := h.reap(patience)
	h.fail(fmt.Errorf("CUDA helper: %w", os.ErrClosed))
	h.sock.Close()
	return err
}

// reap waits until the helper is reaped and kills it when it takes too long.
func (h *Helper) reap(patience time.Duration) error {
	select {
	case <-h.exited:
		return nil
	case <-time.After(patience):
	}
	h.cmd.Process.Kill()
	select {
	case <-h.exited:
		return fmt.Errorf("close CUDA helper: did not end within %v and was killed", patience)
	case <-time.After(reapTimeout):
		return fmt.Errorf("close CUDA helper: process %d could not be killed", h.cmd.Process.Pid)
	}
}

// fail ends all calls with err and kills the helper. Only the first counts.
func (h *Helper) fail(err error) {
	h.mu.Lock()
	first := h.err == nil
	if first {
		h.err = err
		for _, c := range h.calls {
			c.limit.Stop()
		}
		h.calls = nil
		close(h.down)
	}
	h.mu.Unlock()
	if first {
		h.cmd.Process.Kill() // an error means that it is gone already
	}
}

// read hands each reply to its call, until there are no more.
func (h *Helper) read() {
	buf := make([]byte, wire.MaxMessage+1)
	for {
		n, err := h.sock.Read(buf)
		if err != nil || n == 0 {
			h.lost()
			return
		}
		reply, err := wire.DecodeReply(buf[:n])
		if err != nil {
			h.fail(fmt.Errorf("%w: %w", ErrHelperGarbled, err))
			return
		}
		h.mu.Lock()
		c := h.calls[reply.ID]
		delete(h.calls, reply.ID)
		h.mu.Unlock()
		if c == nil {
			h.fail(fmt.Errorf("%w: reply %d to no request", ErrHelperGarbled, reply.ID))
			return
		}
		c.limit.Stop()
		c.reply <- reply
	}
}

// lost ends all calls because the helper closed its end: it is exiting, or has.
func (h *Helper) lost() {
	select {
	case <-h.exited:
	case <-time.After(2 * time.Second): // closed its socket and lives: not ours any more
		h.cmd.Process.Kill()
		select {
		case <-h.exited:
		case <-time.After(reapTimeout):
			h.fail(fmt.Errorf("%w: its socket is closed", ErrHelperGone))
			return
		}
	}
	if said := h.stderr.String(); said != "" {
		h.fail(fmt.Errorf("%w (%s): %s", ErrHelperGone, h.status, said))
		return
	}
	h.fail(fmt.Errorf("%w (%s)", ErrHelperGone, h.status))
}
