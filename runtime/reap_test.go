// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/pkg/sys/reaper"
	"golang.org/x/sys/unix"
)

// A command that lives long, as the tracer of a container that is suspended in
// memory, does not hold up what the reaper has to say of others.
func TestReapHearsAll(t *testing.T) {
	// reapEnded waits for a child's end, and has the reaper take it and tell.
	reapEnded := func(pid int) {
		t.Helper()
		var ended unix.Siginfo
		if err := unix.Waitid(unix.P_PID, pid, &ended, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
			t.Fatal(err)
		}
		if err := reaper.Reap(); err != nil {
			t.Fatal(err)
		}
	}
	lives := exec.Command("sleep", "600")
	wait, err := reap(lives)
	if err != nil {
		t.Fatal(err)
	}
	pid := lives.Process.Pid
	for range 40 {
		other := exec.Command("true")
		if err := other.Start(); err != nil {
			t.Fatal(err)
		}
		reapEnded(other.Process.Pid)
		_ = other.Wait() // the reaper has its end
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		stacks := make([]byte, 1<<20)
		stacks = stacks[:runtime.Stack(stacks, true)]
		if !strings.Contains(string(stacks), "reaper.(*Monitor).notify") {
			break
		}
		if time.Now().After(end) {
			t.Error("the reaper waits for someone to listen")
			break
		}
	}
	if err := unix.Kill(pid, unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	reapEnded(pid)
	if status, err := wait(); status != 128+int(unix.SIGTERM) || err != nil {
		t.Errorf("it ended with %d, %v", status, err)
	}
}
