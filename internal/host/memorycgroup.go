// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"path/filepath"
	"slices"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// MemoryCgroup is a cgroup that memory is charged to, made by MakeMemoryCgroup. It
// stays when this process ends.
type MemoryCgroup struct {
	Dir string // of version 2, to start a process in; "" for version 1
	add func(pid uint64) error
}

// Add moves a process into the cgroup. What it has used before stays charged to
// where it was.
func (c MemoryCgroup) Add(pid int) error { return c.add(uint64(pid)) }

// MakeMemoryCgroup makes a cgroup, a path from the root of the memory hierarchy, if
// there is none, and sets its limit in bytes; 0 leaves the limit as it is.
func MakeMemoryCgroup(path string, limit int64) (MemoryCgroup, error) {
	name := "/" + path
	if cgroups.Mode() == cgroups.Unified {
		const root = "/sys/fs/cgroup"
		resources := &cgroup2.Resources{Memory: &cgroup2.Memory{}}
		if limit > 0 {
			resources.Memory.Max = &limit
		}
		cg, err := cgroup2.NewManager(root, name, resources)
		if err != nil {
			return MemoryCgroup{}, fmt.Errorf("make cgroup %s: %w", name, err)
		}
		return MemoryCgroup{Dir: filepath.Join(root, name), add: cg.AddProc}, nil
	}
	resources := &specs.LinuxResources{Memory: &specs.LinuxMemory{}}
	if limit > 0 {
		resources.Memory.Limit = &limit
	}
	memory := func() ([]cgroup1.Subsystem, error) {
		all, err := cgroup1.Default()
		return slices.DeleteFunc(all, func(s cgroup1.Subsystem) bool { return s.Name() != cgroup1.Memory }), err
	}
	cg, err := cgroup1.New(cgroup1.StaticPath(name), resources, cgroup1.WithHierarchy(memory))
	if err != nil {
		return MemoryCgroup{}, fmt.Errorf("make cgroup %s: %w", name, err)
	}
	return MemoryCgroup{add: func(pid uint64) error { return cg.AddProc(pid) }}, nil
}
