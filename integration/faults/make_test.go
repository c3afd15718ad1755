// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/powerdisk"
)

// hit is a fault that is made.
type hit struct {
	l       *lane
	cell    Cell
	at      point // where the program stands
	cancel  context.CancelFunc
	client  *client.Client
	reached atomic.Bool
	// over says that what follows is not the operation's.
	over atomic.Bool
	// ended says that the client has its answer.
	ended atomic.Bool
	// beside is what goes on beside the operation and ends with it.
	beside sync.WaitGroup
	t      testing.TB
	err    error // the operation's

	// giveTurn ends what takeTurn has begun.
	giveTurn func()
	// undo is done when the operation is over.
	undo []func()
	// broke says that a worker was told that it cannot read or write.
	broke atomic.Bool
	// missed says that the process that was to be hit was not there.
	missed atomic.Bool

	mu   sync.Mutex
	open int // points at which the shim stands
	// at work is the shim that has begun the operation and is not through with it; 0 for none.
	atWork int
}

// make runs an operation and makes the fault in it. It returns when both are over.
func (l *lane) make(t testing.TB, c Cell, operation func(context.Context, *client.Client) error) *hit {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cl, err := client.New(shared.Address(), client.WithDefaultNamespace(shared.Namespace()))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	h := &hit{l: l, cell: c, cancel: cancel, client: cl, t: t}
	if strings.HasPrefix(c.Fault.Name, "hang-") {
		bound := steered.path + ".bound"
		if err := os.WriteFile(bound, []byte("3s"), 0o600); err != nil {
			t.Fatal(err)
		}
		h.undo = append(h.undo, func() { _ = os.Remove(bound) })
	}
	if c.Place.Scenario.InTurn {
		h.takeTurn()
		defer h.giveTurn()
	}
	if c.Fault.Name == recordsFull && c.Place.first() {
		makers[recordsFull](h)
		h.reached.Store(true)
	}
	steered.at(l.k.ID, h.answer)
	t.Cleanup(func() { steered.at(l.k.ID, nil) })
	done := make(chan error, 1)
	go func() { done <- operation(ctx, cl) }()
	select {
	case h.err = <-done:
		if !h.clientLeft() {
			h.over.Store(true)
		}
	case <-time.After(2 * limit):
		t.Fatalf("the operation did not end in %v", 2*limit)
	}
	h.ended.Store(true)
	h.beside.Wait()
	for _, undo := range h.undo {
		undo()
	}
	return h
}

// answer is what the control calls when a program stands at a point. It makes the cell's fault there,
// once, and returns the error that the program's step is to fail with; "" has it go on.
func (h *hit) answer(p point) string {
	h.mu.Lock()
	h.open++
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		h.open--
		// A turn is taken before an operation's first step, and given after its end.
		if p.Operation == h.cell.Place.Scenario.Operation && (p.Step != gives || p.Moment == "end") {
			h.atWork = p.Pid
			if p.Step == over || p.Step == gives {
				h.atWork = 0
			}
		}
		h.mu.Unlock()
	}()
	place := h.cell.Place
	if p.Step == waits && p.Moment == "begin" {
		defer time.AfterFunc(100*time.Millisecond, h.giveTurn)
	}
	if io := inWorker[h.cell.Fault.Name]; io != "" && p.Operation == Command && p.Step == io && p.Moment == "move" && !h.ended.Load() {
		h.broke.Store(true)
		return "input/output error, on order"
	}
	if p.Operation != place.Scenario.Operation || h.over.Load() {
		return ""
	}
	moment := place.Moment
	if moment == "during" { // the maker waits beside the operation until the process is there, see signal
		moment = "begin"
	}
	if p.Step == place.Step && p.Moment == moment && h.reached.CompareAndSwap(false, true) {
		h.at = p
		return makers[h.cell.Fault.Name](h)
	}
	if place.After != "" && p.Step == place.After && p.Moment == "end" { // so that the undo is taken
		return "a fault on order leads back"
	}
	return ""
}

// killAll kills the container as soon as that can be done: one that is being restored has no process
// at first, and a kill is refused.
func (h *hit) killAll(ctx context.Context) {
	for ctx.Err() == nil {
		_, err := shared.Client().TaskService().Kill(ctx, &tasks.KillRequest{ContainerID: h.l.k.ID, Signal: uint32(unix.SIGKILL), All: true})
		status, serr := h.l.k.Status(ctx)
		if err == nil || serr != nil || status == client.Stopped || status == client.Created && h.over.Load() {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// clientLeft reports whether the fault is that the client does not wait for the answer.
func (h *hit) clientLeft() bool {
	switch h.cell.Fault.Name {
	case "cancel", "client-gone", "error-and-cancel", "SIGKILL-containerd", "SIGKILL-helper-and-containerd", slowEnd:
		return true
	}
	return false
}

// inWorker are the steps of workers that faults are made in.
var inWorker = map[string]string{"read-error": "verify", "write-error": "write"}

// working reports whether the shim is at work: it may be when its client has left.
func (h *hit) working() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.open > 0 || h.atWork != 0 && nameOf(h.atWork) != ""
}

// aside does something beside the operation, and gives it a moment's advance.
func (h *hit) aside(do func(context.Context)) {
	done := make(chan struct{})
	h.beside.Go(func() {
		defer close(done)
		ctx, cancel := context.WithTimeout(session.Context(), limit)
		defer cancel()
		do(ctx)
	})
	select {
	case <-done:
	case <-time.After(200 * time.Millisecond):
	}
}

// program is the pid of the program, restored in part or whole; 0 for none.
func (h *hit) program() int {
	if h.cell.Place.Scenario.Operation != "restore" {
		return h.l.pid
	}
	runc := childNamed(h.at.Pid, "runc")
	for _, parent := range []int{runc, childNamed(runc, "criu"), h.at.Pid} {
		children, _ := harness.Children(parent)
		for _, pid := range children {
			if comm(pid) == "gpuwork" {
				return pid
			}
		}
	}
	return 0
}

// makers make the faults, by name. What they return is answered to the program at the point.
var makers = map[string]func(*hit) string{
	"error": func(*hit) string { return "a fault on order" },
	"delay": func(*hit) string { time.Sleep(300 * time.Millisecond); return "" },
	"cancel": func(h *hit) string {
		h.cancel()
		time.Sleep(20 * time.Millisecond)
		return ""
	},
	"client-gone": func(h *hit) string {
		_ = h.client.Close()
		time.Sleep(20 * time.Millisecond)
		return ""
	},
	"kill": func(h *hit) string {
		h.aside(func(ctx context.Context) {
			h.killAll(ctx)
		})
		return ""
	},
	"delete": func(h *hit) string {
		h.aside(func(ctx context.Context) {
			for ctx.Err() == nil {
				h.killAll(ctx)
				_, err := shared.Client().TaskService().Delete(ctx, &tasks.DeleteTaskRequest{ContainerID: h.l.k.ID})
				if err == nil || errdefs.IsNotFound(err) {
					return
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
		return ""
	},
	"no-files": func(h *hit) string {
		limit := unix.Rlimit{Cur: uint64(len(names(fmt.Sprintf("/proc/%d/fd", h.at.Pid))))}
		var before unix.Rlimit
		if err := unix.Prlimit(h.at.Pid, unix.RLIMIT_NOFILE, nil, &before); err != nil {
			h.t.Error(err)
			return ""
		}
		limit.Max = before.Max
		if err := unix.Prlimit(h.at.Pid, unix.RLIMIT_NOFILE, &limit, nil); err != nil {
			h.t.Error(err)
		}
		pid := h.at.Pid
		h.undo = append(h.undo, func() { _ = unix.Prlimit(pid, unix.RLIMIT_NOFILE, &before, nil) })
		return ""
	},
	"no-pids": func(h *hit) string {
		h.limit(filepath.Join(shared.Namespace(), h.l.k.ID), "pids.max", "pids.current")
		return ""
	},
	"no-memory": func(h *hit) string {
		limit, usage := "memory.limit_in_bytes", "memory.usage_in_bytes"
		if harness.CgroupVersion() == 2 {
			limit, usage = "memory.max", "memory.current"
		}
		h.limit(shared.StagingCgroup(h.l.way.cgroup()), limit, usage)
		return ""
	},
	"disk-full":       func(h *hit) string { return h.fill(h.l.dir, 0) },
	"disk-fills-up":   func(h *hit) string { return h.fill(h.l.dir, 300<<10) },
	"spill-disk-full": func(h *hit) string { return h.fill(h.l.spill, int64(rank(h.cell)%2)*(300<<10)) },
	"state-full":      func(h *hit) string { return h.fill(bundles(), 0) },
	"rootfs-full":     func(h *hit) string { return h.fill(roots(), 0) },
	"store-full":      func(h *hit) string { return h.fill(contents(), 0) },
	recordsFull:       func(h *hit) string { return h.fill(shared.Records(), 0) },
	"block-writes":    func(h *hit) string { return h.breaks(powerdisk.Writes) },
	"block-reads":     func(h *hit) string { return h.breaks(powerdisk.Reads) },
	"pause": func(h *hit) string {
		h.aside(func(ctx context.Context) {
			_, _ = shared.Client().TaskService().Pause(ctx, &tasks.PauseTaskRequest{ContainerID: h.l.k.ID})
		})
		return ""
	},
	"resume": func(h *hit) string {
		h.aside(func(ctx context.Context) {
			_, _ = shared.Client().TaskService().Resume(ctx, &tasks.ResumeTaskRequest{ContainerID: h.l.k.ID})
		})
		return ""
	},
	"hook-fails": func(*hit) string { return "" }, // which the container was made with, see hook
	"hook-hangs": func(*hit) string { return "" },
	"gpu-lost": func(h *hit) string {
		h.gpu("fail=lock:46\nfail=checkpoint:46\nfail=restore:46\nfail=unlock:46\n")
		h.undo = append(h.undo, func() { h.gpu("") })
		return ""
	},
	hangDriver: func(h *hit) string {
		h.gpu("hang=checkpoint\nhang=restore\n")
		h.undo = append(h.undo, func() { h.gpu("") }) // it goes on
		return ""
	},
	"io-error": func(*hit) string { return "a fault on order" },
	"SIGTERM": func(h *hit) string {
		_ = unix.Kill(h.at.Pid, unix.SIGTERM)
		time.Sleep(20 * time.Millisecond)
		return ""
	},
	"SIGKILL": func(h *hit) string {
		_ = unix.Kill(h.at.Pid, unix.SIGKILL)
		return ""
	},
	"SIGSTOP": func(h *hit) string {
		h.send("the command", []int{h.at.Pid}, unix.SIGSTOP)
		return ""
	},
	"SIGKILL-shim-of": func(h *hit) string {
		_ = unix.Kill(h.l.shim, unix.SIGKILL)
		return ""
	},
	"SIGKILL-containerd-of": func(h *hit) string {
		h.signal(Containerd, unix.SIGKILL)
		return ""
	},
	slowEnd: func(h *hit) string {
		let := h.holdEnd()
		h.signal(Containerd, unix.SIGKILL) // whose undo starts it again
		let()
		return ""
	},
	"read-error":  func(*hit) string { return "" }, // the worker asks, see answer
	"write-error": func(*hit) string { return "" },
	// The kernel drops a SIGSEGV that somebody sends to the first process of a container: it has to crash.
	"SIGSEGV-program": func(h *hit) string {
		conn, err := net.Dial("udp", net.JoinHostPort("127.0.0.1", strconv.Itoa(h.l.k.Port)))
		if err == nil {
			_, err = conn.Write([]byte("crash"))
			_ = conn.Close()
		}
		if err != nil {
			h.t.Error(err)
		}
		return ""
	},
	"error-and-cancel": func(h *hit) string {
		h.cancel()
		time.Sleep(20 * time.Millisecond)
		return "a fault on order"
	},
}

func init() {
	for _, victim := range []string{Shim, Program, Helper, Worker, Mover, Runc, CRIU, Containerd} {
		makers["SIGKILL-"+victim] = func(h *hit) string {
			h.signal(victim, unix.SIGKILL)
			return ""
		}
		if victim != Program {
			makers["SIGSEGV-"+victim] = func(h *hit) string {
				h.signal(victim, unix.SIGSEGV)
				return ""
			}
		}
		makers["SIGSTOP-"+victim] = func(h *hit) string {
			h.signal(victim, unix.SIGSTOP)
			return ""
		}
		makers["hang-"+victim] = func(h *hit) string {
			h.signal(victim, unix.SIGSTOP)
			return ""
		}
		for _, other := range []string{Worker, Containerd} {
			makers["SIGKILL-"+victim+"-and-"+other] = func(h *hit) string {
				h.signal(victim, unix.SIGKILL)
				h.signal(other, unix.SIGKILL)
				return ""
			}
		}
	}
}

// turnLimit is a memory_limit, in bytes, of which takeTurn claims all. It has room for a lane's GPU state three
// times, since checkpoints on a tmpfs count: the last one, the next, and a suspended container. A context on a
// real GPU takes half a gigabyte (520 MiB on an H200), on the software GPU 2 MiB.
func turnLimit() int64 {
	if session.GPU.Kind == harness.RealGPU {
		return 2 << 30
	}
	return 64 << 20
}

// takeTurn claims all memory of [staging], as the shim of another container does (internal/operation/quota), until
// giveTurn.
func (h *hit) takeTurn() {
	name := "memory" + strings.ReplaceAll(filepath.Clean("/"+shared.StagingCgroup("turns")), "/", ":")
	dir := filepath.Join("/run/gpuckpt/quota", name)
	f, err := os.Create(filepath.Join(dir, "claim-of-the-test"))
	if errors.Is(err, os.ErrNotExist) {
		if err = os.MkdirAll(dir, 0o700); err == nil {
			f, err = os.Create(filepath.Join(dir, "claim-of-the-test"))
		}
	}
	if err == nil {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
	}
	if err == nil {
		_, err = f.WriteString(strconv.FormatInt(turnLimit(), 10))
	}
	if err != nil {
		h.t.Fatalf("take a turn: %v", err)
	}
	h.giveTurn = sync.OnceFunc(func() {
		_ = os.Remove(f.Name())
		_ = f.Close()
	})
	h.t.Cleanup(func() {
		h.giveTurn()
		_ = os.Remove(dir) // unless a shim that was killed has left a claim
	})
}

// slowEnd is the fault that holdEnd is for.
const slowEnd = "SIGKILL-containerd-slow-end"

// holdEnd keeps the container's first process from ending until the next containerd has been at work
// for a while. The first process of a pid namespace waits, after SIGKILL, for the parents of all
// others to have waited for them, and this test is the parent of one. So does a process with a real
// driver, which takes seconds to free GPU memory. The kernel does not list a process that is so far.
func (h *hit) holdEnd() (let func()) {
	held, err := inPIDNamespace(h.program(), "sleep", "600")
	if err != nil {
		h.t.Error(err)
		return func() {}
	}
	again, over, freed := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		err := endedOr(held.Process.Pid, over)
		<-again
		select {
		case <-over:
		case <-time.After(2 * time.Second): // in which containerd is there and has asked
		}
		_ = held.Wait() // it was killed
		freed <- err
	}()
	h.undo = append(h.undo, func() { close(again) })
	return func() {
		h.undo = append(h.undo, func() {
			time.AfterFunc(2*time.Second, func() { close(over) })
			if err := <-freed; err != nil {
				h.t.Error(err)
			}
		})
	}
}

// endedOr waits until a child has ended, and leaves it unwaited for. When over is closed, it kills it.
func endedOr(pid int, over <-chan struct{}) error {
	for {
		var info unix.Siginfo
		if err := unix.Waitid(unix.P_PID, pid, &info, unix.WEXITED|unix.WNOWAIT|unix.WNOHANG, nil); err != nil {
			return fmt.Errorf("wait for process %d: %w", pid, err)
		}
		if info.Signo != 0 {
			return nil
		}
		select {
		case <-over:
			_ = unix.Kill(pid, unix.SIGKILL)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// inPIDNamespace starts a command in the pid namespace of a process.
func inPIDNamespace(pid int, name string, args ...string) (*exec.Cmd, error) {
	namespace, err := os.Open(fmt.Sprintf("/proc/%d/ns/pid", pid))
	if err != nil {
		return nil, err
	}
	defer namespace.Close()
	cmd := exec.Command(name, args...)
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and it ends with this goroutine
		err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWPID)
		if err == nil {
			err = cmd.Start()
		}
		started <- err
	}()
	return cmd, <-started
}

// end is the size of a file.
func end(f *os.File) int64 {
	st, err := f.Stat()
	if err != nil {
		return 0
	}
	return st.Size()
}

// fill leaves so many bytes of a small file system free until the operation is over.
func (h *hit) fill(dir string, free int64) string {
	path := filepath.Join(dir, "full")
	f, err := os.Create(path)
	if err != nil {
		h.t.Error(err)
		return ""
	}
	defer f.Close()
	for size := int64(1 << 30); size >= 4096; {
		if unix.Fallocate(int(f.Fd()), 0, end(f), size) != nil {
			size /= 2
		}
	}
	if err := f.Truncate(max(0, end(f)-free)); err != nil {
		h.t.Error(err)
	}
	h.undo = append(h.undo, func() { _ = os.Remove(path) })
	return ""
}

// slowMover has a mover at work for as long as CRIU is, beside whatever else the software GPU is told.
const slowMover = "out_delay_ms=1000\n"

// gpu tells the software GPU something.
func (h *hit) gpu(lines string) {
	if err := shared.SetSoftwareGPU(slowMover + lines); err != nil {
		h.t.Error(err)
	}
}

// limit sets a limit of a cgroup to what is in use, until the operation is over.
func (h *hit) limit(cgroup, limit, usage string) {
	dirs, err := harness.CgroupsOf(cgroup)
	if err != nil {
		h.t.Error(err)
	}
	for _, dir := range dirs {
		file := filepath.Join(dir, limit)
		before, err := os.ReadFile(file)
		if err != nil {
			continue // another controller's
		}
		now, err := os.ReadFile(filepath.Join(dir, usage))
		if err == nil {
			err = os.WriteFile(file, now, 0)
		}
		if err != nil && !errors.Is(err, unix.EBUSY) { // it is above that already
			h.t.Error(err)
		}
		h.undo = append(h.undo, func() {
			text := strings.TrimSpace(string(before))
			if n, err := strconv.ParseUint(text, 10, 64); err == nil && n > 1<<60 {
				text = "-1"
			}
			if err := os.WriteFile(file, []byte(text), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
				h.t.Error(err)
			}
		})
		return
	}
	h.t.Errorf("no %s of %s", limit, cgroup)
}

// signal signals a process: at once or, in the middle of a step, as soon as it is there. One that
// is stopped goes on in a moment.
func (h *hit) signal(victim string, signal unix.Signal) {
	if h.cell.Place.Moment == "during" {
		h.beside.Go(func() {
			for !h.ended.Load() {
				if pids := h.victims(victim); len(pids) > 0 {
					switch {
					case victim == Helper, victim == Worker: // which are there, and then at work
						time.Sleep(time.Duration(rank(h.cell)%40) * time.Millisecond)
					case h.cell.Place.Scenario.Operation == "restore":
						time.Sleep(time.Duration(rank(h.cell)%100) * time.Millisecond)
					}
					h.send(victim, pids, signal)
					return
				}
			}
			h.missed.Store(true)
		})
		return
	}
	pids := h.victims(victim)
	if len(pids) == 0 && victim == Worker && h.cell.Place.Scenario.Operation == "restore" {
		h.missed.Store(true) // the digester begins when the container is created, and may be done
		return
	}
	if len(pids) == 0 {
		h.t.Errorf("there is no %s", victim)
	}
	h.send(victim, pids, signal)
}

func (h *hit) send(victim string, pids []int, signal unix.Signal) {
	switch {
	case victim == Containerd && signal == unix.SIGKILL:
		// It is waited for, and started again when the operation has failed: which it has at once.
		h.undo = append(h.undo, func() {
			err := shared.Halt(session.Context(), unix.SIGKILL)
			if err == nil || errors.Is(err, os.ErrProcessDone) {
				err = shared.StartAgain(session.Context())
			}
			if err != nil {
				h.t.Error(err)
			}
		})
		if err := unix.Kill(pids[0], signal); err != nil {
			h.t.Error(err)
		}
		return
	}
	for _, pid := range pids {
		_ = unix.Kill(pid, signal) // or it has ended
	}
	if strings.HasPrefix(h.cell.Fault.Name, "hang-") {
		h.undo = append(h.undo, func() {
			for _, pid := range pids {
				_ = unix.Kill(pid, unix.SIGCONT) // or it was ended
			}
		})
	} else if signal == unix.SIGSTOP {
		h.beside.Go(func() {
			time.Sleep(300 * time.Millisecond)
			// CRIU stops a program at its end that was stopped at its begin, or fails if it goes on meanwhile.
			for victim == Program && h.cell.Place.Scenario.Operation == "checkpoint" && len(h.victims(CRIU)) > 0 {
				time.Sleep(5 * time.Millisecond)
			}
			for _, pid := range pids {
				_ = unix.Kill(pid, unix.SIGCONT)
			}
		})
	}
}

// victims are the processes of that name.
func (h *hit) victims(victim string) (pids []int) {
	one := func(pid int) []int {
		if pid == 0 {
			return nil
		}
		return []int{pid}
	}
	switch victim {
	case Shim:
		return one(h.at.Pid)
	case Containerd:
		return one(shared.Pid())
	case Program:
		return one(h.program())
	case Runc:
		return one(childNamed(h.at.Pid, "runc"))
	case Mover:
		return movers(h.at.Pid, h.l.dir)
	case CRIU:
		return one(childNamed(childNamed(h.at.Pid, "runc"), "criu"))
	}
	children, _ := harness.Children(h.at.Pid)
	for _, pid := range children {
		name := nameOf(pid)
		if helper := name == "gpuckpt-cuda-helper"; strings.HasPrefix(name, "gpuckpt-") && helper == (victim == Helper) {
			pids = append(pids, pid)
		}
	}
	return pids
}
