// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/typeurl/v2"

	"github.com/gpuckpt/gpuckpt/internal/host"
)

// Stats answers for restored containers: runc's service learns a container's
// cgroup when it creates the first process, which a restore does not.
func (s *Service) Stats(ctx context.Context, r *taskAPI.StatsRequest) (*taskAPI.StatsResponse, error) {
	// Not in turn: containerd asks one container after the other, and so all of
	// the node's would wait for a checkpoint of this one.
	var cg *host.Cgroup
	if c := s.container(r.ID); c != nil {
		cg = c.cgroup.Load()
	}
	if cg == nil {
		return s.TTRPCTaskService.Stats(ctx, r)
	}
	metrics, err := cg.Metrics()
	if err != nil {
		return nil, toGRPC(err)
	}
	data, err := typeurl.MarshalAnyToProto(metrics)
	return &taskAPI.StatsResponse{Stats: data}, toGRPC(err)
}
