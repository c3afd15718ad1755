// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/containerd/log"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/steer"
)

// Left alone the driver copies GPU state on one thread of each process, at a
// fraction of the bus's speed. Copy threads in the process share its copies: during
// a Save (steer.Target) and for a Restore (startCopyThreads).

// copyThreads returns how many threads are to copy in each of the processes; the
// setting is the most. Threads beyond the processors that the container or one of
// the processes may use would only take these from each other. init is the
// container's first process.
func copyThreads(setting, init int, pids []int) int {
	if setting == 0 {
		return 0
	}
	n := min(setting, processors(init)/max(1, len(pids)))
	for _, pid := range pids {
		n = min(n, runsOn(pid))
	}
	return max(1, n)
}

// runsOn returns how many processors a process may run on, and so the threads that
// it makes.
func runsOn(pid int) int {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(pid, &set); err != nil {
		return runtime.NumCPU()
	}
	return set.Count()
}

// processors returns how many processors a process may use: those it may run on, or
// what its cgroup's quota comes to.
func processors(pid int) int {
	n := runsOn(pid)
	root, dir := "/sys/fs/cgroup", ""
	if cgroups.Mode() == cgroups.Unified {
		dir, _ = cgroup2.PidGroupPath(pid)
	} else if paths, err := cgroup1.ParseCgroupFile(fmt.Sprintf("/proc/%d/cgroup", pid)); err == nil {
		root, dir = filepath.Join(root, "cpu"), paths["cpu"]
	}
	if quota := cpuQuota(root, dir); quota > 0 {
		n = min(n, int(quota))
	}
	return n
}

// cpuQuota returns the processors that the quotas of a cgroup and of those above it,
// up to root, come to, of either version; 0 if there are none.
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

// startCopyThreads has the driver copy faster from the areas that were mapped. A
// driver that cannot be helped copies as it always does.
func startCopyThreads(ctx context.Context, tracer *steer.Session, mappings []steer.Mapping, threads int) error {
	if threads < 2 {
		return nil // alone the driver reads faster than our code (measured, H200): 1.9 s for 16 GiB, not 2.4 s
	}
	var drivers []steer.Thread
	for _, m := range mappings {
		if t := (steer.Thread{PID: m.PID, TID: m.TID}); !slices.Contains(drivers, t) {
			drivers = append(drivers, t)
		}
	}
	notes, err := tracer.StartCopyThreads(drivers, threads)
	for _, n := range notes {
		log.G(ctx).Info(n)
	}
	return err
}

// stopCopyThreads undoes startCopyThreads. An error is for the log: the processes
// are right as they are.
func stopCopyThreads(ctx context.Context, tracer *steer.Session) {
	notes, err := tracer.StopCopyThreads()
	for _, n := range notes {
		log.G(ctx).Info(n)
	}
	if err != nil {
		log.G(ctx).WithError(err).Warn("code that copied for the driver is left in a process")
	}
}
