// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"fmt"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
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
	metrics, err := cg.Metrics()
	if err != nil {
		return nil, toGRPC(err)
	}
	data, err := typeurl.MarshalAnyToProto(metrics)
	if err != nil {
		return nil, toGRPC(fmt.Errorf("encode the cgroup's statistics: %w", err))
	}
	return &taskAPI.StatsResponse{Stats: data}, nil
}
