// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"fmt"
	"os"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/config"
	"github.com/gpuckpt/gpuckpt/internal/host"
)

// Start starts a container or an exec'd process, or restores a container that
// was created from a checkpoint. After a restore that failed no process of the
// container is left.
func (s *Service) Start(ctx context.Context, r *taskAPI.StartRequest) (*taskAPI.StartResponse, error) {
	c := s.container(r.ID)
	if c == nil {
		return s.TTRPCTaskService.Start(ctx, r)
	}
	if r.ExecID != "" {
		return s.startExec(ctx, c, r)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.restore == nil {
		resp, err := s.TTRPCTaskService.Start(ctx, r)
		if err == nil {
			c.pid = int(resp.Pid)
		}
		return resp, err
	}
	resp, err := s.restore(ctx, c, r)
	if err != nil {
		return nil, toGRPC(err)
	}
	return resp, nil
}

// restore is the restore of a container, step by step.
func (s *Service) restore(ctx context.Context, c *container, r *taskAPI.StartRequest) (resp *taskAPI.StartResponse, err error) {
	q := newSequence("restore", c.id)
	view, err := c.config()
	if err != nil {
		return nil, err
	}
	if err := c.writeCRIUSettings(ctx, view); err != nil {
		return nil, err
	}
	defer func() { q.save(context.WithoutCancel(ctx), c.bundle) }()
	// CRIU has read everything it needs when it returns, and there is no
	// second try with this container.
	defer c.removeRestoreDir(context.WithoutCancel(ctx))
	defer c.restore.closeHelper()
	if err := c.restore.settle(); err != nil {
		return nil, err
	}

	steps := []step{
		{
			name: "restore processes", do: func(ctx context.Context) (uint64, error) {
				// Not given up once begun: CRIU would go on without runc.
				before, watch := children(os.Getpid()), watchCRIU(ctx, true)
				resp, err = s.TTRPCTaskService.Start(context.WithoutCancel(ctx), r)
				if err = watch.end(errgrpc.ToNative(err)); err != nil {
					return 0, joinBack(withCRIULog(err, view.Node, c, restoreLog), c.removeHalf(before))
				}
				c.pid = int(resp.Pid)
				return sizeOf(c.restore.dir)
			},
			back: "kill", undo: func(ctx context.Context) error { return s.kill(ctx, c) },
		},
		{name: "watch cgroup", do: func(ctx context.Context) (uint64, error) {
			cg, err := host.CgroupOf(c.pid)
			if err != nil {
				return 0, err
			}
			c.cgroup.Store(cg)
			if err := c.raiseOOMScores(); err != nil {
				return 0, err
			}
			return 0, s.oom.Add(c.id, cg)
		}},
	}
	steps = append(steps, step{name: "device nodes", do: func(context.Context) (uint64, error) { return 0, c.restore.gpus.fixNodes(c.pid) }})
	if c.restore.metadata != nil {
		// Before there is a process that could change anything.
		pinned, err := pin(c.restore.checkpoint)
		if err != nil {
			return nil, err
		}
		defer pinned.close()
		areas, err := c.readRestored(ctx, view.Node, pinned)
		if err != nil {
			return nil, err
		}
		defer areas.close()
		steps = append(steps,
			step{name: "map GPU state", do: func(ctx context.Context) (uint64, error) {
				return areas.bytes(), c.mapRestored(ctx, view.Node, areas)
			}},
			step{name: "restore GPU state", do: func(ctx context.Context) (uint64, error) {
				return c.restoreGPU(ctx, view.Node, areas)
			}},
		)
	}
	if err := q.run(ctx, steps...); err != nil {
		return nil, err
	}
	return resp, nil
}

// restoreGPU has the driver move the GPU state of the restored processes back,
// and unlocks them. Until then every CUDA call of theirs blocks, as it did at the
// checkpoint. The digests of the state are checked while the driver works, and
// before the unlock.
func (c *container) restoreGPU(ctx context.Context, node config.Node, areas *restoredAreas) (bytes uint64, err error) {
	var procs []cuda.Process
	for _, p := range c.restore.metadata.Processes {
		state, err := cuda.ParseState(p.State)
		if err != nil {
			return 0, err
		}
		// The container may share its pids with others, whose processes the
		// driver would take as well.
		pid, err := c.hostPID(p.PID)
		if err != nil {
			return 0, err
		}
		procs = append(procs, cuda.Process{PID: pid, NSPID: p.PID, State: state})
		bytes += p.Bytes
	}
	err = c.restoreOnto(ctx, node, procs)
	if cerr := areas.check(); cerr != nil {
		return 0, cerr // it explains whatever the driver may have to say
	}
	if err != nil {
		return 0, err
	}
	areas.calm(ctx)
	if err := cuda.UnlockAll(ctx, c.restore.helper, procs); err != nil {
		return 0, err
	}
	return bytes, nil
}

// kill ends a container whose restore failed and waits for its end.
func (s *Service) kill(ctx context.Context, c *container) error {
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	if _, err := s.TTRPCTaskService.Kill(ctx, &taskAPI.KillRequest{ID: c.id, Signal: uint32(unix.SIGKILL), All: true}); err != nil {
		if err := errgrpc.ToNative(err); !errdefs.IsNotFound(err) {
			return fmt.Errorf("kill the container: %w", err)
		}
	}
	if _, err := s.TTRPCTaskService.Wait(ctx, &taskAPI.WaitRequest{ID: c.id}); err != nil {
		return fmt.Errorf("wait for the container's end: %w", err)
	}
	return nil
}
