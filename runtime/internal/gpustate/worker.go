// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"errors"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/gpu/steer"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/operation/sequence"
	"github.com/gpuckpt/gpuckpt/runtime/internal/charged"
	"github.com/gpuckpt/gpuckpt/runtime/internal/cudahelper"
)

// tracers starts workers in the cgroup that pays for GPU state, and keeps one tracer.
type tracers struct {
	run     cudahelper.Run
	node    config.Staging
	session *steer.Session // nil while nothing is traced or saved
	sweep   bool           // a tracer died: something of it may be open in the processes
}

func (t *tracers) started(ctx context.Context) (*steer.Session, error) {
	if t.session != nil && t.session.Alive() {
		return t.session, nil
	}
	t.close()
	var err error
	t.session, err = charged.Start(ctx, t.run, t.node, steer.Start)
	return t.session, err
}

func (t *tracers) digester(ctx context.Context) (*staging.Digester, error) {
	return charged.Start(ctx, t.run, t.node, staging.StartDigester)
}

// close ends the tracer, and notes whether it had died before.
func (t *tracers) close() {
	if t.session != nil {
		if err := t.session.Close(); errors.Is(err, steer.ErrTracerGone) {
			t.sweep = true
		}
		t.session = nil
	}
}

// held runs do while every thread of the container, except drivers of procs, is held by ptrace. do is to
// call thaw, after which those can work. The order is: frozen,
// held, thawed, frozen again, let go; the application does not run in between, unless it has a lock
// that the driver waits for (whileLocked).
func (t *tracers) held(ctx context.Context, target Target, procs cuda.Group, do func(thaw func() error) error) error {
	cgroup, err := target.Cgroup()
	if err != nil {
		return err
	}
	pids, err := cgroup.Pids()
	if err != nil {
		return err
	}
	tracer, err := t.started(ctx)
	if err != nil {
		return err
	}
	if err := cgroup.Loosen(); err != nil {
		return err
	}
	if err := tracer.Hold(pids, drivers(procs)); err != nil {
		return err
	}
	if err := host.RefuseForeign(cgroup.Pids, pids); err != nil {
		t.close()
		return err
	}
	thawed, settle := false, func() {}
	err = do(func() error {
		if err := cgroup.Thaw(); err != nil {
			return sequence.Join(err, cgroup.Freeze())
		}
		thawed, settle = true, whileLocked(ctx, callers(procs), tracer.Breathe)
		return nil
	})
	settle()
	if !thawed {
		t.close() // it cannot let go of frozen threads otherwise
		return err
	}
	return sequence.Join(err, cgroup.Freeze(), tracer.Release(), cgroup.ThawIfKilled(target.Init()))
}
