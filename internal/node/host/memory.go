// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/opencontainers/cgroups/fscommon"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// MemoryCgroup is a cgroup that memory is charged to. It stays when nobody is in it.
type MemoryCgroup struct {
	dir string // of version 2; "" for version 1
	add func(pid uint64) error
}

// MakeMemoryCgroup makes a cgroup, if need be, by its path from the root of the memory hierarchy,
// and sets its limit in bytes; 0 leaves that as it is.
func MakeMemoryCgroup(path string, limit int64) (*MemoryCgroup, error) {
	if isLimit(path, limit) {
		limit = 0 // while a little more than that is charged, as may be for a moment, the kernel refuses it
	}
	if cgroups.Mode() == cgroups.Unified {
		resources := &cgroup2.Resources{Memory: &cgroup2.Memory{}}
		if limit > 0 {
			resources.Memory.Max = &limit
		}
		cg, err := cgroup2.NewManager(unifiedRoot, path, resources)
		if err != nil {
			return nil, fmt.Errorf("make cgroup %s: %w", path, err)
		}
		return &MemoryCgroup{dir: filepath.Join(unifiedRoot, path), add: cg.AddProc}, nil
	}
	resources := &specs.LinuxResources{Memory: &specs.LinuxMemory{}}
	if limit > 0 {
		resources.Memory.Limit = &limit
	}
	memory := func() ([]cgroup1.Subsystem, error) {
		all, err := cgroup1.Default()
		return slices.DeleteFunc(all, func(s cgroup1.Subsystem) bool { return s.Name() != cgroup1.Memory }), err
	}
	cg, err := cgroup1.New(cgroup1.StaticPath(path), resources, cgroup1.WithHierarchy(memory))
	if err != nil {
		return nil, fmt.Errorf("make cgroup %s: %w", path, err)
	}
	return &MemoryCgroup{add: func(pid uint64) error { return cg.AddProc(pid) }}, nil
}

// Add moves a process into the cgroup.
func (m *MemoryCgroup) Add(pid int) error { return m.add(uint64(pid)) }

// Open opens the cgroup's directory, for a process that is to start in it (syscall.SysProcAttr,
// CgroupFD). It returns nil for version 1, which has no such way.
func (m *MemoryCgroup) Open() (*os.File, error) {
	if m.dir == "" {
		return nil, nil
	}
	return os.Open(m.dir)
}

// Headroom returns how much more memory, in bytes, the processes of a cgroup may take before its
// limit, or that of one above it, is reached. The cgroup is a path from the root of the memory
// hierarchy; "" is this process's. A value that cannot be read is no limit.
func Headroom(cgroup string) uint64 {
	limit, usage := memoryFiles()
	cache := []string{"total_inactive_file", "total_active_file"}
	if cgroups.Mode() == cgroups.Unified {
		cache = []string{"inactive_file", "active_file"}
	}
	return leastOf(os.Getpid(), cgroup, func(dir string) uint64 { return headroomOf(dir, limit, usage, cache) })
}

// memoryFiles names the files of a memory cgroup that have its limit and what is charged to it.
func memoryFiles() (limit, usage string) {
	if cgroups.Mode() == cgroups.Unified {
		return "memory.max", "memory.current"
	}
	return "memory.limit_in_bytes", "memory.usage_in_bytes"
}

// MemoryLimit returns how much memory a process may have, in bytes: the least of the limits of its
// cgroup, of those above it, and of the machine's memory.
func MemoryLimit(pid int) uint64 {
	file, _ := memoryFiles()
	limit := leastOf(pid, "", func(dir string) uint64 {
		bytes, err := fscommon.GetCgroupParamUint(dir, file)
		if err != nil {
			return math.MaxUint64
		}
		return bytes
	})
	var machine unix.Sysinfo_t
	if err := unix.Sysinfo(&machine); err != nil {
		return limit
	}
	return min(limit, machine.Totalram*uint64(machine.Unit))
}

// MemoryUsage returns how much memory is charged to the cgroup of a process, in bytes. It is not known
// without the controller.
func MemoryUsage(pid int) (bytes uint64, known bool) {
	root, controller := hierarchy("memory")
	cgroup, err := CgroupPath(pid, controller)
	if err != nil {
		return 0, false
	}
	_, usage := memoryFiles()
	bytes, err = fscommon.GetCgroupParamUint(filepath.Join(root, cgroup), usage)
	return bytes, err == nil
}

// isLimit reports whether the limit of a cgroup is that one. The kernel keeps whole pages.
func isLimit(cgroup string, limit int64) bool {
	root, _ := hierarchy("memory")
	file, _ := memoryFiles()
	have, err := fscommon.GetCgroupParamUint(filepath.Join(root, cgroup), file)
	return err == nil && have == uint64(limit)&^uint64(os.Getpagesize()-1)
}

// leastOf returns the least value of a memory cgroup and of those above it, whose limits hold as
// well. read is given the cgroup's directory. "" is the process's cgroup.
func leastOf(pid int, cgroup string, read func(dir string) uint64) uint64 {
	root, controller := hierarchy("memory")
	if cgroup == "" {
		cgroup, _ = CgroupPath(pid, controller)
	}
	least := uint64(math.MaxUint64)
	for dir := filepath.Join(root, cgroup); strings.HasPrefix(dir, root+"/"); dir = filepath.Dir(dir) {
		least = min(least, read(dir))
	}
	return least
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
