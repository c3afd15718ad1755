// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/v2/client"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
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
	// beside is what goes on beside the operation and ends with it.
	beside sync.WaitGroup
	t      *testing.T
	err    error // the operation's

	mu   sync.Mutex
	open int // points at which the shim stands
	last time.Time
}

// make runs an operation and makes the fault in it. It returns when both are over.
func (l *lane) make(t *testing.T, c Cell, operation func(context.Context, *client.Client) error) *hit {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cl, err := client.New(shared.Address(), client.WithDefaultNamespace(shared.Namespace()))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	h := &hit{l: l, cell: c, cancel: cancel, client: cl, t: t}
	steered.at(l.k.ID, h.answer)
	t.Cleanup(func() { steered.at(l.k.ID, nil) })
	done := make(chan error, 1)
	go func() { done <- operation(ctx, cl) }()
	select {
	case h.err = <-done:
	case <-time.After(2 * limit):
		t.Fatalf("the operation did not end in %v", 2*limit)
	}
	h.beside.Wait()
	return h
}

// answer is the control's question.
func (h *hit) answer(p point) string {
	h.mu.Lock()
	h.open++
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		h.open--
		h.last = time.Now()
		h.mu.Unlock()
	}()
	place := h.cell.Place
	if p.Operation != place.Scenario.Operation || h.over.Load() {
		return ""
	}
	moment := place.Moment
	if moment == "during" {
		moment = "begin"
	}
	if p.Step == place.Step && p.Moment == moment && h.reached.CompareAndSwap(false, true) {
		h.at = p
		return makers[h.cell.Fault.Name](h)
	}
	if place.After != "" && p.Step == place.After && p.Moment == "end" {
		return "a fault on order leads back"
	}
	return ""
}

// working reports whether the shim was at a point a moment ago.
func (h *hit) working() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.open > 0 || time.Since(h.last) < 100*time.Millisecond && h.err != nil
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
			for h.l.kill(ctx) != nil && ctx.Err() == nil {
				time.Sleep(10 * time.Millisecond)
			}
		})
		return ""
	},
	"delete": func(h *hit) string {
		h.aside(func(ctx context.Context) {
			for ctx.Err() == nil {
				err := h.l.kill(ctx)
				if err == nil {
					_, err = shared.Client().TaskService().Delete(ctx, &tasks.DeleteTaskRequest{ContainerID: h.l.k.ID})
				}
				if err == nil {
					return
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
		return ""
	},
	"SIGKILL-shim": func(h *hit) string {
		_ = unix.Kill(h.at.Pid, unix.SIGKILL)
		return ""
	},
	"SIGKILL-program": func(h *hit) string {
		pid := h.program()
		if pid == 0 {
			h.t.Errorf("there is no program")
			return ""
		}
		_ = unix.Kill(pid, unix.SIGKILL)
		return ""
	},
}
