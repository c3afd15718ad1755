// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"time"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	ptypes "github.com/containerd/containerd/v2/pkg/protobuf/types"

	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/runtime/internal/execs"
)

// execHold is how long a new exec waits for a paused container to go on: the kubelet gives up after
// the probe's own time and two minutes.
const execHold = time.Minute

// Exec prepares an exec'd process when the container's gate lets it in: runc's service refuses it
// in a container that is paused. Nothing runs before Start.
func (s *Service) Exec(ctx context.Context, r *taskAPI.ExecProcessRequest) (*ptypes.Empty, error) {
	c := s.container(r.ID)
	if c == nil {
		return s.TTRPCTaskService.Exec(ctx, r)
	}
	leave, err := c.execs.Enter(ctx, execHold)
	if err != nil {
		return nil, toGRPC(err)
	}
	defer leave()
	return s.TTRPCTaskService.Exec(ctx, r)
}

// startExec starts an exec'd process when the container's gate lets it in.
func (s *Service) startExec(ctx context.Context, c *container, r *taskAPI.StartRequest) (*taskAPI.StartResponse, error) {
	leave, err := c.execs.Enter(ctx, execHold)
	if err != nil {
		return nil, toGRPC(err)
	}
	defer leave()
	return s.TTRPCTaskService.Start(ctx, r)
}

// execed describes the container to package execs.
func (c *container) execed() execs.Container { return execs.Container{Init: c.pid, Pids: c.pids} }

// holdExecs waits until exec'd processes have ended, and keeps new ones waiting until letExecsIn.
func (p *pausing) holdExecs(ctx context.Context) (uint64, error) {
	view, err := p.read()
	if err != nil {
		return 0, err
	}
	opts := execs.Options{Wait: time.Duration(view.LockTimeout), EndShells: view.Shells == config.End}
	p.c.execs.Hold()
	if err := p.c.execs.Drain(ctx, p.c.execed(), opts); err != nil {
		p.c.execs.LetIn()
		return 0, err
	}
	return 0, nil
}

// letExecsIn lets those start that have waited.
func (p *pausing) letExecsIn(context.Context) error {
	p.c.execs.LetIn()
	return nil
}
