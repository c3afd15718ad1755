// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// sleeper starts a shell with one child, and returns both pids.
func sleeper(t *testing.T) (parent, child int) {
	t.Helper()
	cmd := exec.Command("/bin/sh", "-c", "sleep 600 & echo; wait")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		children, _ := Children(cmd.Process.Pid)
		for _, pid := range append(children, cmd.Process.Pid) {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		_ = cmd.Wait()
	})
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	children, err := Children(cmd.Process.Pid)
	if err != nil || len(children) != 1 {
		t.Fatalf("children of the shell: %v, error %v, want one", children, err)
	}
	return cmd.Process.Pid, children[0]
}

func TestProcess(t *testing.T) {
	parent, child := sleeper(t)
	if threads, err := Threads(parent); !slices.Equal(threads, []int{parent}) || err != nil {
		t.Errorf("threads of the shell: %v, error %v, want itself", threads, err)
	}
	if children, err := Children(child); len(children) != 0 || err != nil {
		t.Errorf("children of sleep: %v, error %v, want none", children, err)
	}
	if err := unix.Kill(child, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	state := ""
	for range 1000 {
		var err error
		if state, err = ProcessState(child); err != nil {
			t.Fatal(err)
		}
		if state == "T" {
			break
		}
		unix.Nanosleep(&unix.Timespec{Nsec: 1e6}, nil)
	}
	if state != "T" {
		t.Errorf("state of a stopped process: %s, want T", state)
	}
	if memory, err := ProcessMemory(parent); memory.RSS < 4096 || memory.PSS < 1024 || memory.PSS > memory.RSS || err != nil {
		t.Errorf("memory of the shell: %+v, error %v", memory, err)
	}
	if _, err := ProcessMemory(1 << 30); err == nil {
		t.Error("the memory of no process was read")
	}
}

func TestMountsUnder(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a mount needs root")
	}
	dir := t.TempDir()
	outer, inner := filepath.Join(dir, "outer"), filepath.Join(dir, "outer", "inner")
	for _, point := range []string{outer, inner} {
		if err := os.Mkdir(point, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("test", point, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(point, unix.MNT_DETACH) })
	}
	if got, err := MountsUnder(dir); !slices.Equal(got, []string{outer, inner}) || err != nil {
		t.Errorf("mounts: %v, error %v, want %s and %s", got, err, outer, inner)
	}
	if err := unmountUnder(dir); err != nil {
		t.Error(err)
	}
	if got, err := MountsUnder(dir); len(got) != 0 || err != nil {
		t.Errorf("mounts after unmountUnder: %v, error %v", got, err)
	}
}
