// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/containerd/cgroups/v3"
	"golang.org/x/sys/unix"
)

// CPUSet returns the processors that the cgroup of a process has; nil if that cannot be read.
func CPUSet(pid int) *unix.CPUSet {
	root, controller := hierarchy("cpuset")
	file := "cpuset.cpus.effective"
	if cgroups.Mode() != cgroups.Unified {
		file = "cpuset.effective_cpus"
	}
	dir, err := CgroupPath(pid, controller)
	if err != nil {
		return nil
	}
	for { // a cgroup without the controller has those of the one above
		if text, err := os.ReadFile(filepath.Join(root, dir, file)); err == nil {
			set, err := ParseCPUs(strings.TrimSpace(string(text)))
			if err != nil {
				return nil
			}
			return set
		}
		if dir == "/" || dir == "." {
			return nil
		}
		dir = filepath.Dir(dir)
	}
}

// ParseCPUs reads a list of processors, "0-3,8"; "-" is nil.
func ParseCPUs(list string) (*unix.CPUSet, error) {
	if list == "-" {
		return nil, nil
	}
	set := new(unix.CPUSet)
	for part := range strings.SplitSeq(list, ",") {
		from, to, isRange := strings.Cut(part, "-")
		first, err := strconv.ParseUint(from, 10, 16)
		last := first
		if err == nil && isRange {
			last, err = strconv.ParseUint(to, 10, 16)
		}
		if err != nil || last < first || last >= uint64(len(set)*64) {
			return nil, fmt.Errorf("%q is no list of processors", list)
		}
		for cpu := first; cpu <= last; cpu++ {
			set.Set(int(cpu))
		}
	}
	return set, nil
}

// CPUList is the inverse of ParseCPUs, without ranges.
func CPUList(set *unix.CPUSet) string {
	if set == nil {
		return "-"
	}
	var cpus []string
	for cpu := range len(set) * 64 {
		if set.IsSet(cpu) {
			cpus = append(cpus, strconv.Itoa(cpu))
		}
	}
	return strings.Join(cpus, ",")
}
