// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

// A process gets a signal if it is the one that is meant when it is asked, and only then.
func TestSignal(t *testing.T) {
	cmd := exec.Command("sleep", "100")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	if err := Signal(pid, unix.SIGKILL, func(pid int) bool { return Command(pid) == "another" }); err != nil || !IsChild(pid) {
		t.Fatalf("the process is not the one that was meant: %v", err)
	}
	// It ends, and its number is free, between the look and the signal.
	gone := func(int) bool {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return true
	}
	if err := Signal(pid, unix.SIGKILL, gone); err != nil {
		t.Error(err)
	}
	if err := Signal(pid, unix.SIGKILL, IsChild); err != nil {
		t.Errorf("of a process that has ended: %v", err)
	}
}
