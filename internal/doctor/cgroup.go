// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
)

// CheckCgroup looks at the cgroup controllers that freeze containers and that memory
// for GPU state is charged to.
func CheckCgroup(n *Node) []Check {
	a := area{name: "cgroup"}
	mounts, err := n.mounts()
	if err != nil {
		a.add(Failure, "version", err.Error(), "cgroups cannot be looked at", "mount -t proc proc /proc")
		return a.checks
	}
	const noMemory = "memory for GPU state cannot be charged to a cgroup of its own, nor limited"
	const memoryFix = "# add cgroup_enable=memory to the kernel's command line, and take cgroup_disable=memory from it; reboot"
	if at(mounts, "/sys/fs/cgroup", "cgroup2") {
		a.ok("version", "2")
		a.ok("freezer", "cgroup.freeze")
		if slices.Contains(strings.Fields(n.read("sys/fs/cgroup/cgroup.controllers")), "memory") {
			a.ok("memory", "available")
		} else {
			a.add(Warning, "memory", "no memory controller", noMemory, memoryFix)
		}
		return a.checks
	}
	has := func(controller string) bool {
		return slices.ContainsFunc(mounts, func(m *mountinfo.Info) bool {
			return m.FSType == "cgroup" && slices.Contains(strings.Split(m.VFSOptions, ","), controller)
		})
	}
	if !slices.ContainsFunc(mounts, func(m *mountinfo.Info) bool { return m.FSType == "cgroup" }) {
		a.add(Failure, "version", "no cgroups are mounted on /sys/fs/cgroup", "containers cannot run", "mount -t cgroup2 cgroup2 /sys/fs/cgroup")
		return a.checks
	}
	a.ok("version", "1")
	if has("freezer") {
		a.ok("freezer", "available")
	} else {
		a.add(Failure, "freezer", "no hierarchy with the freezer", "containers cannot be paused, nor checkpointed", "mkdir -p /sys/fs/cgroup/freezer; mount -t cgroup -o freezer cgroup /sys/fs/cgroup/freezer")
	}
	if has("memory") {
		a.ok("memory", "available")
	} else {
		a.add(Warning, "memory", "no hierarchy with the memory controller", noMemory, memoryFix)
	}
	return a.checks
}

// mounts returns the machine's mounts, in the order they were mounted.
func (n *Node) mounts() ([]*mountinfo.Info, error) {
	f, err := os.Open(n.path("proc/self/mountinfo"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	mounts, err := mountinfo.GetMountsFromReader(f, nil)
	if err != nil {
		return nil, fmt.Errorf("read the mounts: %w", err)
	}
	return mounts, nil
}

// mountOf returns the mount that a path lies on, nil for none.
func mountOf(mounts []*mountinfo.Info, p string) (on *mountinfo.Info) {
	p = path.Clean(p)
	for _, m := range mounts {
		if p == m.Mountpoint || m.Mountpoint == "/" || strings.HasPrefix(p, m.Mountpoint+"/") {
			if on == nil || len(m.Mountpoint) >= len(on.Mountpoint) { // the last mounted covers
				on = m
			}
		}
	}
	return on
}

// at reports whether a file system of that type is mounted at a path.
func at(mounts []*mountinfo.Info, p, kind string) bool {
	m := mountOf(mounts, p)
	return m != nil && m.Mountpoint == p && m.FSType == kind
}
