// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"os/exec"
	goruntime "runtime"
	"sync"

	"github.com/containerd/containerd/v2/pkg/sys/reaper"
	"github.com/containerd/go-runc"
)

// monitor is containerd's reaper, but that it keeps the thread that has started a runc until that has
// ended. go-runc sets PDEATHSIG: the kernel kills runc when that thread ends, and a shim's threads end
// where they have entered a namespace or traced a process (golang.org/issue/27505).
type monitor struct {
	*reaper.Monitor
	resumes sync.Map // what is closed before a runc resumes a container, by the container's id
}

// StartLocked starts a command on a thread that no other goroutine uses before it has ended.
func (m *monitor) StartLocked(cmd *exec.Cmd) (exits chan runc.Exit, err error) {
	if n := len(cmd.Args); n > 1 && cmd.Args[n-2] == "resume" {
		if begun, asked := m.resumes.LoadAndDelete(cmd.Args[n-1]); asked {
			close(begun.(chan struct{}))
		}
	}
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
