// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package staging

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/proc"
)

// headroom is Headroom for this process's own cgroup.
func headroom() uint64 { return Headroom("") }

// Headroom is how much more memory a cgroup, and those above it, let the
// processes in it have, in bytes. The cgroup is a path from the root of the
// memory hierarchy; "" is that of this process. It is asked before memory is filled: the kernel's answer to a cgroup
// that goes over its limit is to kill a process in it. What cannot be read is no
// limit.
func Headroom(cgroup string) uint64 {
	root, controller, limit, usage := "/sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
	cache := []string{"total_inactive_file", "total_active_file"}
	var fs unix.Statfs_t
	if err := unix.Statfs("/sys/fs/cgroup", &fs); err == nil && fs.Type == unix.CGROUP2_SUPER_MAGIC {
		root, controller, limit, usage = "/sys/fs/cgroup", "", "memory.max", "memory.current"
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
