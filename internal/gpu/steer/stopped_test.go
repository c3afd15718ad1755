// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/gpu/ptrace"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// A process of several threads that SIGSTOP has stopped can be held while its cgroup is frozen, again
// and again. It executes nothing in between, is stopped afterwards, and goes on with SIGCONT.
func TestStoppedThreadsCanBeHeld(t *testing.T) {
	f := newFreezer(t) // first, so that it is removed last
	cmd, mem := spinner(t)
	pid := cmd.Process.Pid
	if err := os.WriteFile(f.procs, fmt.Append(nil, pid), 0); err != nil {
		t.Fatal(err)
	}
	threads := func() []int {
		tids, err := ptrace.Threads(pid)
		if err != nil {
			t.Fatal(err)
		}
		return tids
	}
	stopped := func() bool {
		for _, tid := range threads() {
			if status, err := proc.ThreadStatus(pid, tid); err != nil || !strings.HasPrefix(strings.ToUpper(status.Field("State")), "T") || status.Tracer() != 0 {
				return false
			}
		}
		return true
	}
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	eventually(t, "stopped", stopped)
	had := [3]uint64{atomic.LoadUint64(&mem[0]), atomic.LoadUint64(&mem[1]), atomic.LoadUint64(&mem[2])}
	for range 3 {
		f.set(t, f.on)
		cg, err := host.CgroupOf(pid)
		if err != nil {
			t.Fatal(err)
		}
		if err := cg.Loosen(); err != nil {
			t.Fatal(err)
		}
		held := make(chan error, 1)
		s := session(t)
		go func() { held <- s.Hold([]int{pid}, nil) }()
		select {
		case err := <-held:
			if err != nil {
				t.Fatal(err)
			}
		case <-time.After(20 * time.Second):
			f.set(t, f.off) // or the tracer cannot end
			t.Fatal("the hold of a stopped process in a frozen cgroup does not come back")
		}
		f.set(t, f.off)
		eventually(t, "all threads stand in a stop of the tracer's", func() bool {
			for _, tid := range threads() {
				if status, err := proc.ThreadStatus(pid, tid); err != nil || !strings.HasPrefix(strings.ToUpper(status.Field("State")), "T") || status.Tracer() == 0 {
					return false
				}
			}
			return true
		})
		f.set(t, f.on)
		if err := s.Release(); err != nil {
			t.Fatal(err)
		}
		f.set(t, f.off)
		eventually(t, "stopped as before", stopped)
	}
	if got := [3]uint64{atomic.LoadUint64(&mem[0]), atomic.LoadUint64(&mem[1]), atomic.LoadUint64(&mem[2])}; got != had {
		t.Errorf("the stopped process counted from %v to %v", had, got)
	}
	if err := unix.Kill(pid, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all threads count on", func() bool {
		return atomic.LoadUint64(&mem[0]) > had[0] && atomic.LoadUint64(&mem[1]) > had[1] && atomic.LoadUint64(&mem[2]) > had[2]
	})
}
