// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

// What does not freeze is told of in the end, and holds nobody up for ever.
func TestAwaitFreezer(t *testing.T) {
	file := filepath.Join(t.TempDir(), "freezer.state")
	if err := awaitFreezer(file, "FROZEN", time.Minute); err != nil {
		t.Error(err)
	}
	// It takes what is written, and has nothing to say.
	if err := awaitFreezer(os.DevNull, "FROZEN", 10*time.Millisecond); !errdefs.IsUnavailable(err) {
		t.Errorf("got %v", err)
	}
	if err := awaitFreezer(filepath.Join(file, "none"), "THAWED", time.Minute); err == nil {
		t.Error("no error")
	}
}

// What is left of a killed container does not stay frozen, which nobody would thaw.
func TestLetEnd(t *testing.T) {
	dir := fmt.Sprintf("/sys/fs/cgroup/freezer/gpuckpt-runtime-test-%d", os.Getpid())
	if err := os.Mkdir(dir, 0o755); errors.Is(err, os.ErrNotExist) {
		t.Skip("no cgroup v1: who is frozen by version 2 can be killed")
	} else if err != nil {
		t.Fatal(err)
	}
	cg := &cgroup{path: dir}
	t.Cleanup(func() {
		for range 1000 { // its processes end in their own time
			if os.Remove(dir) == nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Errorf("%s is left", dir)
	})
	for what, killed := range map[string]bool{"lives": false, "first thread ended": true} {
		cmd := startFake(what, 0)
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cg.thaw()
			_ = cmd.Wait()
		})
		pid := cmd.Process.Pid
		for began := time.Now(); killed && time.Since(began) < 20*time.Second; time.Sleep(time.Millisecond) {
			if dead, _ := threadState(fmt.Sprintf("/proc/%d/status", pid)); dead {
				break
			}
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), fmt.Append(nil, pid), 0); err != nil {
			t.Fatal(err)
		}
		if err := cg.freeze(); err != nil {
			t.Fatal(err)
		}
		err := cg.letEnd(pid)
		state, rerr := os.ReadFile(filepath.Join(dir, "freezer.state"))
		if rerr != nil {
			t.Fatal(rerr)
		}
		if (err != nil) != killed || (strings.TrimSpace(string(state)) == "THAWED") != killed {
			t.Errorf("%s: %v, the cgroup is %s", what, err, state)
		}
		if err := cg.thaw(); err != nil {
			t.Fatal(err)
		}
	}
}
