// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

func TestRaiseOOMScore(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	for _, c := range []struct{ to, want int }{{500, 500}, {100, 500}, {501, 501}} {
		if err := raiseOOMScore(pid, c.to); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid))
		if err != nil || strings.TrimSpace(string(got)) != fmt.Sprint(c.want) {
			t.Errorf("to %d: got %s, %v", c.to, got, err)
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	if err := raiseOOMScore(pid, 600); err != nil {
		t.Errorf("of a process that has ended: %v", err)
	}
}
