// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/containerd/log"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/internal/config"
	"github.com/gpuckpt/gpuckpt/internal/staging"
	"github.com/gpuckpt/gpuckpt/internal/steer"
	"github.com/gpuckpt/gpuckpt/internal/worker"
)

// startedTracer returns a tracer that lives.
func (s *State) startedTracer(ctx context.Context) (*steer.Session, error) {
	if s.tracer != nil && s.tracer.Alive() {
		return s.tracer, nil
	}
	s.closeTracer()
	var err error
	s.tracer, err = startTracer(ctx, s.run, s.opts.Config.Staging)
	return s.tracer, err
}

// closeTracer ends the tracer, and notes whether it had died before.
func (s *State) closeTracer() {
	if s.tracer != nil {
		if err := s.tracer.Close(); errors.Is(err, steer.ErrTracerGone) {
			s.sweep = true
		}
		s.tracer = nil
	}
}

// startTracer starts a tracer in the cgroup that staging memory is charged to.
func startTracer(ctx context.Context, run Run, node config.Staging) (*steer.Session, error) {
	return startCharged(ctx, run, node, steer.Start)
}

// startDigester starts a digester in that cgroup.
func startDigester(ctx context.Context, run Run, node config.Staging) (*staging.Digester, error) {
	return startCharged(ctx, run, node, staging.StartDigester)
}

// process is a worker process that has started.
type process interface {
	Pid() int
	Close() error
}

// startCharged starts a worker process in the cgroup that staging memory is charged
// to.
func startCharged[P process](ctx context.Context, run Run, node config.Staging, start func(worker.Run, *os.File) (P, error)) (P, error) {
	if node.Cgroup == "" {
		return start(run, nil)
	}
	cg, err := makeCgroup(node)
	if err == nil {
		var p P
		if p, err = startIn(run, cg, start); err == nil {
			return p, nil
		}
	}
	if node.MemoryLimit > 0 { // asked for a bound: none is no answer
		var none P
		return none, fmt.Errorf("limit staging memory: %w", err)
	}
	log.G(ctx).WithError(err).Warn("staging memory is charged to containerd's cgroup")
	return start(run, nil)
}

// stagingCgroup is the cgroup that staging memory is charged to.
type stagingCgroup struct {
	dir string // of version 2; "" for version 1
	add func(pid uint64) error
}

// makeCgroup makes the configured cgroup, if need be, and sets its limit.
func makeCgroup(node config.Staging) (stagingCgroup, error) {
	name := "/" + node.Cgroup
	if cgroups.Mode() == cgroups.Unified {
		const root = "/sys/fs/cgroup"
		resources := &cgroup2.Resources{Memory: &cgroup2.Memory{}}
		if node.MemoryLimit > 0 {
			resources.Memory.Max = &node.MemoryLimit
		}
		cg, err := cgroup2.NewManager(root, name, resources)
		if err != nil {
			return stagingCgroup{}, fmt.Errorf("make cgroup %s: %w", name, err)
		}
		return stagingCgroup{dir: filepath.Join(root, name), add: cg.AddProc}, nil
	}
	resources := &specs.LinuxResources{Memory: &specs.LinuxMemory{}}
	if node.MemoryLimit > 0 {
		resources.Memory.Limit = &node.MemoryLimit
	}
	memory := func() ([]cgroup1.Subsystem, error) {
		all, err := cgroup1.Default()
		return slices.DeleteFunc(all, func(s cgroup1.Subsystem) bool { return s.Name() != cgroup1.Memory }), err
	}
	cg, err := cgroup1.New(cgroup1.StaticPath(name), resources, cgroup1.WithHierarchy(memory))
	if err != nil {
		return stagingCgroup{}, fmt.Errorf("make cgroup %s: %w", name, err)
	}
	return stagingCgroup{add: func(pid uint64) error { return cg.AddProc(pid) }}, nil
}

// startIn starts a worker process in a cgroup.
func startIn[P process](run Run, cg stagingCgroup, start func(worker.Run, *os.File) (P, error)) (p P, err error) {
	if cg.dir != "" {
		dir, err := os.Open(cg.dir)
		if err != nil {
			return p, err
		}
		defer dir.Close()
		if p, err := start(run, dir); err == nil {
			return p, nil
		}
		// A filter of system calls may know no clone3.
	}
	if p, err = start(run, nil); err != nil {
		return p, err
	}
	if err := cg.add(uint64(p.Pid())); err != nil {
		p.Close()
		return p, err
	}
	return p, nil
}
