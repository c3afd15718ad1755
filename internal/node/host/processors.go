// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"
)

// RunsOn returns how many processors a process may run on, and so the threads that it makes.
func RunsOn(pid int) int {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(pid, &set); err != nil {
		return runtime.NumCPU()
	}
	return set.Count()
}

// Processors returns how many processors a process may use, also by its cgroup's quota.
func Processors(pid int) int {
	n := RunsOn(pid)
	root, controller := hierarchy("cpu")
	dir, _ := CgroupPath(pid, controller) // one that has ended has no quota
	if quota := cpuQuota(root, dir); quota > 0 {
		n = min(n, int(quota))
	}
	return n
}

// cpuQuota returns the processors that the quotas of a cgroup and of those above it, up to root,
// come to, of either version; 0 if there are none.
func cpuQuota(root, dir string) (least float64) {
	for ; dir != "" && dir != "/" && dir != "."; dir = filepath.Dir(dir) {
		var quota, period float64
		text, err := os.ReadFile(filepath.Join(root, dir, "cpu.max"))
		if err != nil {
			text, _ = os.ReadFile(filepath.Join(root, dir, "cpu.cfs_quota_us"))
			p, _ := os.ReadFile(filepath.Join(root, dir, "cpu.cfs_period_us"))
			text = slices.Concat(text, []byte(" "), p)
		}
		// Without a quota it is "max", or -1.
		if n, _ := fmt.Sscan(string(text), &quota, &period); n == 2 && quota > 0 && period > 0 && (least == 0 || quota/period < least) {
			least = quota / period
		}
	}
	return least
}
