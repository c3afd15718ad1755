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

	"github.com/gpuckpt/gpuckpt/internal/proc"
)

// MemAvailable returns the memory that programs can take without swapping, in bytes.
func MemAvailable() (bytes uint64, known bool) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, false
	}
	return proc.MemAvailable(data)
}

// MemoryCgroup is a cgroup that memory is charged to. It stays when nobody is in it.
type MemoryCgroup struct {
	dir string // of version 2; "" for version 1
	add func(pid uint64) error
}

// MakeMemoryCgroup makes a cgroup if it does not exist, by its path from the root of the
// memory hierarchy, and sets its limit in bytes; 0 leaves the limit as it is.
func MakeMemoryCgroup(path string, limit int64) (*MemoryCgroup, error) {
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

// Open opens the cgroup's directory, for a process that is to start in it
// (syscall.SysProcAttr, CgroupFD). It returns nil for version 1, which has no such way.
func (m *MemoryCgroup) Open() (*os.File, error) {
	if m.dir == "" {
		return nil, nil
	}
	return os.Open(m.dir)
}

// Headroom returns how much more memory the processes of a cgroup may take before its
// limit, or that of one above it, is reached, in bytes. The cgroup is a path from the
// root of the memory hierarchy; "" is that of this process. A value that cannot be read
// is no limit.
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
