// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"os/exec"
	goruntime "runtime"

	"github.com/containerd/containerd/v2/pkg/sys/reaper"
	"github.com/containerd/go-runc"
)

// monitor is containerd's reaper, but that it keeps the thread that has started a runc until that has
// ended. go-runc sets PDEATHSIG: the kernel kills runc when that thread ends, and a shim's threads end
// where they have entered a namespace or traced a process (golang.org/issue/27505).
type monitor struct{ *reaper.Monitor }

// StartLocked starts a command on a thread that no other goroutine uses before it has ended.
func (m monitor) StartLocked(cmd *exec.Cmd) (exits chan runc.Exit, err error) {
	started := make(chan struct{})
	go func() {
		goruntime.LockOSThread()
		defer goruntime.UnlockOSThread()
		seen := m.Subscribe()
		defer m.Unsubscribe(seen)
		exits, err = m.Start(cmd)
		close(started)
		if err != nil {
			return
		}
		for exit := range seen {
			if exit.Pid == cmd.Process.Pid {
				return
			}
		}
	}()
	<-started
	return exits, err
}
