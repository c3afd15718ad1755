// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/cgroups/v3"
	"github.com/opencontainers/cgroups/fscommon"

	"github.com/gpuckpt/gpuckpt/internal/proc"
)

// Headroom returns how much more memory the processes of a cgroup may take before the
// limit of the cgroup, or of one above it, is reached, in bytes. The cgroup is a path
// from the root of the memory hierarchy; "" is that of this process. It must be asked
// before memory is filled: the kernel kills a process in a cgroup that exceeds its limit.
// A value that cannot be read is no limit.
func Headroom(cgroup string) uint64 {
	root, controller, limit, usage := "/sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
	cache := []string{"total_inactive_file", "total_active_file"}
	if cgroups.Mode() == cgroups.Unified {
		root, controller, limit, usage = unifiedRoot, "", "memory.max", "memory.current"
		cache = []string{"inactive_file", "active_file"}
	}
	if cgroup == "" {
		cgroup, _ = proc.CgroupPath(os.Getpid(), controller)
	}
	room := uint64(math.MaxUint64)
	// The limits of the cgroups above hold as well.
	for dir := filepath.Join(root, cgroup); strings.HasPrefix(dir, root+"/"); dir = filepath.Dir(dir) {
		room = min(room, headroomOf(dir, limit, usage, cache))
	}
	return room
}

// headroomOf returns the headroom of one cgroup, by the names of its files.
func headroomOf(dir, limit, usage string, cache []string) uint64 {
	most, err := fscommon.GetCgroupParamUint(dir, limit)
	if err != nil {
		return math.MaxUint64
	}
	used, err := fscommon.GetCgroupParamUint(dir, usage)
	if err != nil {
		return math.MaxUint64
	}
	// Pages of files on disks make room by themselves.
	for _, key := range cache {
		bytes, _ := fscommon.GetValueByKey(dir, "memory.stat", key) // without it there is less room
		used -= min(used, bytes)
	}
	return most - min(most, used)
}
