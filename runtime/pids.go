// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/task"
)

// Pids lists a container's processes. One whose first process is ending has that process until it has
// ended. The kernel does not list it in its cgroup from the moment at which its last thread begins to
// end, and it may take seconds from there on, as where a driver frees GPU memory.
//
// A containerd that starts takes a shim without processes for one that was left behind. It calls
// Delete, which is refused until the process has ended, and removes the bundle all the same. Then
// nobody can delete the container.
func (s *Service) Pids(ctx context.Context, r *taskAPI.PidsRequest) (*taskAPI.PidsResponse, error) {
	resp, err := s.TTRPCTaskService.Pids(ctx, r)
	if err != nil || len(resp.Processes) > 0 {
		return resp, err
	}
	state, err := s.TTRPCTaskService.State(ctx, &taskAPI.StateRequest{ID: r.ID})
	if err == nil && state.Pid != 0 && state.Status != task.Status_STOPPED && state.Status != task.Status_CREATED {
		resp.Processes = []*task.ProcessInfo{{Pid: state.Pid}}
	}
	return resp, nil
}
