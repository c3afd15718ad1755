// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// cgroupDir is the directory of the cgroup that charges a process's memory;
// empty where it could not be found.
type cgroupDir string

// memoryCgroup finds that of a process.
func memoryCgroup(pid int) cgroupDir {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return ""
	}
	root, controller := "/sys/fs/cgroup", ""
	if harness.CgroupVersion() == 1 {
		root, controller = "/sys/fs/cgroup/memory", "memory"
	}
	path, ok := cgroupPath(string(data), controller)
	if !ok {
		return ""
	}
	return cgroupDir(filepath.Join(root, path))
}

// cgroupPath reads /proc/PID/cgroup, whose lines are
// hierarchy-ID:controller-list:cgroup-path (cgroups(7)).
func cgroupPath(text, controller string) (string, bool) {
	for line := range strings.Lines(text) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 {
			continue
		}
		for name := range strings.SplitSeq(parts[1], ",") {
			if name == controller {
				return parts[2], true
			}
		}
	}
	return "", false
}

// peak is the most that it was ever charged with, in bytes; 0 where the kernel
// does not tell or the cgroup is gone.
func (d cgroupDir) peak() uint64 {
	if d == "" {
		return 0
	}
	for _, name := range []string{"memory.peak", "memory.max_usage_in_bytes"} {
		if data, err := os.ReadFile(filepath.Join(string(d), name)); err == nil {
			n, err := strconv.ParseUint(strings.TrimSpace(string(data)), 10, 64)
			if err == nil {
				return n
			}
		}
	}
	return 0
}
