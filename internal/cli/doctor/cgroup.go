// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
)

// CheckCgroup looks at the controllers that freeze containers and that memory is charged to.
func CheckCgroup(n *Node) []Check {
	a := area{name: "cgroup"}
	mounts, err := n.mounts()
	if err != nil {
		return a.with(Failure, "version", err.Error(), "cgroups cannot be looked at", "mount -t proc proc /proc")
	}
	version, freezer, controllers := "2", "cgroup.freeze", strings.Fields(n.read("sys/fs/cgroup/cgroup.controllers"))
	if typeOf(mounts, "/sys/fs/cgroup") == "cgroup2" {
		controllers = append(controllers, "freezer") // in every kernel
	} else {
		version, freezer, controllers = "1", "available", nil
		for _, m := range mounts {
			if m.FSType == "cgroup" {
				controllers = append(controllers, strings.Split(m.VFSOptions, ",")...)
			}
		}
		if controllers == nil {
			return a.with(Failure, "version", "no cgroups are mounted on /sys/fs/cgroup", "containers cannot run", "mount -t cgroup2 cgroup2 /sys/fs/cgroup")
		}
	}
	a.ok("version", "%s", version)
	a.either(slices.Contains(controllers, "freezer"), "freezer", freezer,
		Failure, "no hierarchy with the freezer", "containers cannot be paused, nor checkpointed", "mkdir -p /sys/fs/cgroup/freezer; mount -t cgroup -o freezer cgroup /sys/fs/cgroup/freezer")
	a.either(slices.Contains(controllers, "memory"), "memory", "available",
		Warning, "no memory controller", "memory for GPU state cannot be charged to a cgroup of its own, nor limited",
		"# add cgroup_enable=memory to the kernel's command line, and take cgroup_disable=memory from it; reboot")
	return a.checks
}

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

// typeOf returns the type of the file system that a path lies on, "" for none.
func typeOf(mounts []*mountinfo.Info, p string) (kind string) {
	longest := 0
	for _, m := range mounts {
		within := m.Mountpoint == "/" || p == m.Mountpoint || strings.HasPrefix(p, m.Mountpoint+"/")
		if within && len(m.Mountpoint) >= longest { // the last mounted covers
			kind, longest = m.FSType, len(m.Mountpoint)
		}
	}
	return kind
}
