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
	"github.com/gpuckpt/gpuckpt/trace"
)

// startedTracer returns a tracer that lives.
func (s *State) startedTracer(ctx context.Context) (*trace.Session, error) {
	if s.tracer != nil && s.tracer.Alive() {
		return s.tracer, nil
	}
	s.closeTracer()
	var err error
	s.tracer, err = startWorker(ctx, s.run, s.opts.Config.Staging)
	return s.tracer, err
}

// closeTracer ends the tracer, and notes whether it had died before.
func (s *State) closeTracer() {
	if s.tracer != nil {
		if err := s.tracer.Close(); errors.Is(err, trace.ErrTracerGone) {
			s.sweep = true
		}
		s.tracer = nil
	}
}

// startWorker starts a worker process, which is a tracer if it is told to trace, in
// the cgroup that memory for GPU state is charged to.
func startWorker(ctx context.Context, run Run, staging config.Staging) (*trace.Session, error) {
	if staging.Cgroup == "" {
		return trace.Start(run, nil)
	}
	start, err := makeCgroup(run, staging)
	if err == nil {
		var s *trace.Session
		if s, err = start(); err == nil {
			return s, nil
		}
	}
	if staging.MemoryLimit > 0 { // no limit is not what was asked for
		return nil, fmt.Errorf("limit staging memory: %w", err)
	}
	log.G(ctx).WithError(err).Warn("staging memory is charged to containerd's cgroup")
	return trace.Start(run, nil)
}

// makeCgroup makes the configured cgroup, if need be, and sets its limit. start
// starts a worker in the cgroup.
func makeCgroup(run Run, staging config.Staging) (start func() (*trace.Session, error), err error) {
	name := "/" + staging.Cgroup
	if cgroups.Mode() == cgroups.Unified {
		const root = "/sys/fs/cgroup"
		resources := &cgroup2.Resources{Memory: &cgroup2.Memory{}}
		if staging.MemoryLimit > 0 {
			resources.Memory.Max = &staging.MemoryLimit
		}
		cg, err := cgroup2.NewManager(root, name, resources)
		if err != nil {
			return nil, fmt.Errorf("make cgroup %s: %w", name, err)
		}
		return func() (*trace.Session, error) {
			dir, err := os.Open(filepath.Join(root, name))
			if err != nil {
				return nil, err
			}
			defer dir.Close()
			if s, err := trace.Start(run, dir); err == nil {
				return s, nil
			}
			// A filter of system calls may know no clone3.
			return startMoved(run, cg.AddProc)
		}, nil
	}
	resources := &specs.LinuxResources{Memory: &specs.LinuxMemory{}}
	if staging.MemoryLimit > 0 {
		resources.Memory.Limit = &staging.MemoryLimit
	}
	memory := func() ([]cgroup1.Subsystem, error) {
		all, err := cgroup1.Default()
		return slices.DeleteFunc(all, func(s cgroup1.Subsystem) bool { return s.Name() != cgroup1.Memory }), err
	}
	cg, err := cgroup1.New(cgroup1.StaticPath(name), resources, cgroup1.WithHierarchy(memory))
	if err != nil {
		return nil, fmt.Errorf("make cgroup %s: %w", name, err)
	}
	return func() (*trace.Session, error) {
		return startMoved(run, func(pid uint64) error { return cg.AddProc(pid) })
	}, nil
}

// startMoved starts a worker that move then puts into a cgroup.
func startMoved(run Run, move func(pid uint64) error) (*trace.Session, error) {
	s, err := trace.Start(run, nil)
	if err != nil {
		return nil, err
	}
	if err := move(uint64(s.Pid())); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}
