// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func TestCPUQuota(t *testing.T) {
	for name, test := range map[string]struct {
		files map[string]string
		want  float64
	}{
		"version 2":           {map[string]string{"pod/job/cpu.max": "250000 100000\n"}, 2.5},
		"version 2, none":     {map[string]string{"pod/job/cpu.max": "max 100000\n"}, 0},
		"version 2, above":    {map[string]string{"pod/job/cpu.max": "800000 100000\n", "pod/cpu.max": "50000 100000\n"}, 0.5},
		"version 2, not here": {map[string]string{"pod/job/cpu.max": "max 100000\n", "pod/cpu.max": "300000 100000\n"}, 3},
		"version 1":           {map[string]string{"pod/job/cpu.cfs_quota_us": "200000\n", "pod/job/cpu.cfs_period_us": "100000\n"}, 2},
		"version 1, none":     {map[string]string{"pod/job/cpu.cfs_quota_us": "-1\n", "pod/job/cpu.cfs_period_us": "100000\n"}, 0},
		"no cgroup":           {nil, 0},
		"damaged":             {map[string]string{"pod/job/cpu.max": "100000 0\n", "pod/cpu.max": "\n"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for path, text := range test.files {
				if err := os.MkdirAll(filepath.Join(root, filepath.Dir(path)), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(root, path), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if got := cpuQuota(root, "/pod/job"); got != test.want {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

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

func TestCopyThreads(t *testing.T) {
	pid := os.Getpid()
	all := processors(pid)
	if all < 1 || all > runtime.NumCPU() {
		t.Fatalf("%d processors of %d", all, runtime.NumCPU())
	}
	pinned := pinnedProcess(t)
	for _, test := range []struct {
		setting int
		pids    []int
		want    int
	}{
		{0, []int{pid}, 0},
		{1, []int{pid}, 1},
		{32, []int{pid}, min(32, all)},
		{32, slices.Repeat([]int{pid}, all), 1},
		{32, slices.Repeat([]int{pid}, 100*all), 1},
		{32, []int{pinned}, 1},
	} {
		if got := copyThreads(test.setting, pid, test.pids); got != test.want {
			t.Errorf("copy_threads = %d, %d processes: got %d, want %d", test.setting, len(test.pids), got, test.want)
		}
	}
}
