// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/cgroups/v3"

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
		most, limited := readNumber(filepath.Join(dir, limit))
		used, known := readNumber(filepath.Join(dir, usage))
		if !limited || !known {
			continue
		}
		// Pages of files on disks make room by themselves.
		used -= min(used, statSum(filepath.Join(dir, "memory.stat"), cache))
		room = min(room, most-min(most, used))
	}
	return room
}

// readNumber reads a file that holds a number; "max" is none.
func readNumber(path string) (uint64, bool) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(data)), 10, 64)
	return n, err == nil
}

// statSum adds up some of the lines "name number" of a file.
func statSum(path string, names []string) (sum uint64) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(data)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if n, err := strconv.ParseUint(value, 10, 64); err == nil && slices.Contains(names, name) {
			sum += n
		}
	}
	return sum
}
