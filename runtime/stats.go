// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"fmt"
	"sync"

	"github.com/containerd/cgroups/v3/cgroup1"
	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/containerd/v2/pkg/oom"
	oomv1 "github.com/containerd/containerd/v2/pkg/oom/v1"
	oomv2 "github.com/containerd/containerd/v2/pkg/oom/v2"
	"github.com/containerd/typeurl/v2"
)

// Stats answers for restored containers: runc's service learns a container's
// cgroup when it creates the first process, which a restore does not.
func (s *Service) Stats(ctx context.Context, r *taskAPI.StatsRequest) (*taskAPI.StatsResponse, error) {
	c := s.container(r.ID)
	if c == nil {
		return s.TTRPCTaskService.Stats(ctx, r)
	}
	// Not in turn: containerd asks one container after the other, and so all of
	// the node's would wait for a checkpoint of this one.
	cg := c.cgroup.Load()
	if cg == nil {
		return s.TTRPCTaskService.Stats(ctx, r)
	}
	var metrics any
	var err error
	if cg.v2 != nil {
		metrics, err = cg.v2.Stat()
	} else {
		metrics, err = cg.v1.Stat(cgroup1.IgnoreNotExist)
	}
	if err != nil {
		return nil, toGRPC(fmt.Errorf("read the cgroup's statistics: %w", err))
	}
	data, err := typeurl.MarshalAnyToProto(metrics)
	if err != nil {
		return nil, toGRPC(fmt.Errorf("encode the cgroup's statistics: %w", err))
	}
	return &taskAPI.StatsResponse{Stats: data}, nil
}

// oomWatch publishes the OOM events of restored containers. It costs nothing
// until the first of them.
type oomWatch struct {
	ctx       context.Context
	publisher events.Publisher

	mu      sync.Mutex
	watcher oom.Watcher
}

// add watches a container's cgroup until the cgroup is gone.
func (o *oomWatch) add(id string, cg *cgroup) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.watcher == nil {
		open := oomv1.New
		if cg.v2 != nil {
			open = oomv2.New
		}
		w, err := open(o.publisher)
		if err != nil {
			return fmt.Errorf("watch for OOM events: %w", err)
		}
		o.watcher = w
		go w.Run(o.ctx)
	}
	var err error
	if cg.v2 != nil {
		err = o.watcher.Add(id, cg.v2)
	} else {
		err = o.watcher.Add(id, cg.v1)
	}
	if err != nil {
		return fmt.Errorf("watch for OOM events: %w", err)
	}
	return nil
}
