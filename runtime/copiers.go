// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/containerd/log"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/config"
	"github.com/gpuckpt/gpuckpt/trace"
)

// Left alone the driver copies GPU state on one thread of each process, at a
// fraction of the bus's speed. A trace.Session has others of the process share in
// that, during a checkpoint (trace.Target) and before a restore (quicken, calm).

// copyThreads is how many threads are to copy in each of these processes. What the
// container, or one of them, may not use of the machine's processors they would only
// take from each other.
func (c *container) copyThreads(node config.Node, pids []int) int {
	n := node.Staging.CopyThreads
	if n == 0 {
		return 0
	}
	n = min(n, c.processors()/max(1, len(pids)))
	for _, pid := range pids {
		n = min(n, runsOn(pid))
	}
	return max(1, n)
}

// runsOn is how many processors a process may run on, and so the threads that it
// makes.
func runsOn(pid int) int {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(pid, &set); err != nil {
		return goruntime.NumCPU()
	}
	return set.Count()
}

// processors is how many the container's first process may use: those it may run
// on, or what its cgroup's quota comes to.
func (c *container) processors() int {
	n := runsOn(c.pid)
	root, dir := "/sys/fs/cgroup", ""
	if cgroups.Mode() == cgroups.Unified {
		dir, _ = cgroup2.PidGroupPath(c.pid)
	} else if paths, err := cgroup1.ParseCgroupFile(fmt.Sprintf("/proc/%d/cgroup", c.pid)); err == nil {
		root, dir = filepath.Join(root, "cpu"), paths["cpu"]
	}
	if quota := cpuQuota(root, dir); quota > 0 {
		n = min(n, int(quota))
	}
	return n
}

// cpuQuota gives the processors that the quotas of a cgroup and of those above it,
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

// quicken has the driver copy faster from the areas that were mapped. Where it
// cannot be done it copies as it does.
func quicken(ctx context.Context, tracer *trace.Session, mappings []trace.Mapping, copiers int) error {
	if copiers < 2 {
		return nil // alone it reads faster than our code (measured, H200): 1.9 s for 16 GiB, not 2.4
	}
	var threads []trace.Thread
	for _, m := range mappings {
		if t := (trace.Thread{PID: m.PID, TID: m.TID}); !slices.Contains(threads, t) {
			threads = append(threads, t)
		}
	}
	notes, err := tracer.Quicken(threads, copiers)
	for _, n := range notes {
		log.G(ctx).Info(n)
	}
	return err
}

// calm undoes quicken. An error is for the log: the processes are right as they
// are.
func calm(ctx context.Context, tracer *trace.Session) {
	notes, err := tracer.Calm()
	for _, n := range notes {
		log.G(ctx).Info(n)
	}
	if err != nil {
		log.G(ctx).WithError(err).Warn("code that copied for the driver is left in a process")
	}
}
