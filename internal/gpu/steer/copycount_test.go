// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"os"
	"os/exec"
	"runtime"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// pinnedProcess is one that may run on one processor.
func pinnedProcess(t *testing.T) (pid int) {
	t.Helper()
	cmd := exec.Command("sleep", "100")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	var may, one unix.CPUSet
	if err := unix.SchedGetaffinity(cmd.Process.Pid, &may); err != nil {
		t.Fatal(err)
	}
	for cpu := 0; one.Count() == 0; cpu++ {
		if may.IsSet(cpu) {
			one.Set(cpu)
		}
	}
	if err := unix.SchedSetaffinity(cmd.Process.Pid, &one); err != nil {
		t.Fatal(err)
	}
	return cmd.Process.Pid
}

func TestHowManyCopyThreads(t *testing.T) {
	pid := os.Getpid()
	all := host.Processors(pid)
	if all < 1 || all > runtime.NumCPU() {
		t.Fatalf("%d processors of %d", all, runtime.NumCPU())
	}
	pinned := pinnedProcess(t)
	for _, test := range []struct {
		setting int
		pids    []int
		atOnce  int
		want    int
	}{
		{0, []int{pid}, 1, 0},
		{1, []int{pid}, 1, 1},
		{32, []int{pid}, 1, min(32, all)},
		{32, slices.Repeat([]int{pid}, all), 1, 1},
		{32, slices.Repeat([]int{pid}, 100*all), 1, 1},
		{32, []int{pid}, 2, max(1, min(32, all/2))},
		{32, []int{pid}, all, 1},
		{32, []int{pinned}, 1, 1},
	} {
		if got := CopyThreads(test.setting, pid, test.pids, test.atOnce); got != test.want {
			t.Errorf("copy_threads = %d, %d processes, %d at once: got %d, want %d", test.setting, len(test.pids), test.atOnce, got, test.want)
		}
	}
}
