// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"os"
	"os/exec"
	"os/signal"
	goruntime "runtime"
	"syscall"
	"testing"

	"github.com/containerd/containerd/v2/pkg/sys/reaper"
	"github.com/containerd/go-runc"
)

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
	m := monitor{reaper.Default}
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
