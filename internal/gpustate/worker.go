// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/internal/config"
	"github.com/gpuckpt/gpuckpt/internal/host"
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

// makeCgroup makes the configured cgroup, if need be, and sets its limit.
func makeCgroup(node config.Staging) (*host.MemoryCgroup, error) {
	return host.MakeMemoryCgroup("/"+node.Cgroup, node.MemoryLimit)
}

// startIn starts a worker process in a cgroup.
func startIn[P process](run Run, cg *host.MemoryCgroup, start func(worker.Run, *os.File) (P, error)) (p P, err error) {
	dir, err := cg.Open()
	if err != nil {
		return p, err
	}
	if dir != nil {
		defer dir.Close()
		if p, err := start(run, dir); err == nil {
			return p, nil
		}
		// A filter of system calls may know no clone3.
	}
	if p, err = start(run, nil); err != nil {
		return p, err
	}
	if err := cg.Add(p.Pid()); err != nil {
		p.Close()
		return p, err
	}
	return p, nil
}
