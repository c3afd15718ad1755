// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"os"
	"os/exec"
	"os/signal"
	goruntime "runtime"
	"syscall"
	"testing"
	"time"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	ptypes "github.com/containerd/containerd/v2/pkg/protobuf/types"
	"github.com/containerd/containerd/v2/pkg/sys/reaper"
	"github.com/containerd/go-runc"
)

// ending is runc's service with a container that was paused and ends: it has runc resume the container, and
// says that it has ended when that is over.
type ending struct {
	taskAPI.TTRPCTaskService
	resume func() error
	over   chan struct{}
}

func (e *ending) Kill(context.Context, *taskAPI.KillRequest) (*ptypes.Empty, error) { return nil, nil }

func (e *ending) Wait(context.Context, *taskAPI.WaitRequest) (*taskAPI.WaitResponse, error) {
	err := e.resume()
	<-e.over
	return nil, err
}

// Who ends a paused container does not wait until runc has resumed it.
func TestKillOfAPausedContainer(t *testing.T) {
	runc := &ending{over: make(chan struct{})}
	defer close(runc.over)
	s := &Service{TTRPCTaskService: runc, monitor: monitor{Monitor: reaper.Default}}
	runc.resume = func() error {
		_, err := s.monitor.StartLocked(exec.Command("/no runc is here", "resume", "c"))
		return err
	}
	ended := make(chan error)
	go func() { ended <- s.kill(t.Context(), &container{id: "c"}) }()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("it waits for runc")
	}
}

// The thread that asked for a runc ends, as one does that enters a namespace. runc ends by itself.
func TestRuncOutlivesItsThread(t *testing.T) {
	children := make(chan os.Signal, 32)
	signal.Notify(children, syscall.SIGCHLD)
	defer signal.Stop(children)
	go func() {
		for range children {
			_ = reaper.Reap() // nothing else starts processes here
		}
	}()
	m := &monitor{Monitor: reaper.Default}
	for range 20 {
		cmd := exec.CommandContext(t.Context(), "sleep", "0.1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		var exits chan runc.Exit
		var err error
		asked := make(chan struct{})
		go func() {
			exits, err = m.StartLocked(cmd)
			goruntime.LockOSThread() // and never unlocked
			close(asked)
		}()
		if <-asked; err != nil {
			t.Fatal(err)
		}
		if status, err := m.Wait(cmd, exits); err != nil || status != 0 {
			t.Fatalf("it has ended with %d, %v", status, err)
		}
	}
}
