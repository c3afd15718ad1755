// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"errors"
	"slices"
	"testing"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/task"
)

// runcService answers Pids and State as runc's service does; it has no other calls.
type runcService struct {
	taskAPI.TTRPCTaskService
	pids  []uint32
	err   error
	state taskAPI.StateResponse
}

func (r *runcService) Pids(context.Context, *taskAPI.PidsRequest) (*taskAPI.PidsResponse, error) {
	resp := &taskAPI.PidsResponse{}
	for _, pid := range r.pids {
		resp.Processes = append(resp.Processes, &task.ProcessInfo{Pid: pid})
	}
	return resp, r.err
}

func (r *runcService) State(context.Context, *taskAPI.StateRequest) (*taskAPI.StateResponse, error) {
	return &r.state, nil
}

// A container that the kernel lists no process of has its first one until that has ended.
func TestPidsOfOneThatEnds(t *testing.T) {
	for _, c := range []struct {
		name  string
		runc  *runcService
		want  []uint32
		fails bool
	}{
		{name: "it runs", runc: &runcService{pids: []uint32{7, 8}, state: taskAPI.StateResponse{Pid: 7, Status: task.Status_RUNNING}}, want: []uint32{7, 8}},
		{name: "it is ending", runc: &runcService{state: taskAPI.StateResponse{Pid: 7, Status: task.Status_RUNNING}}, want: []uint32{7}},
		{name: "it was paused and is ending", runc: &runcService{state: taskAPI.StateResponse{Pid: 7, Status: task.Status_PAUSED}}, want: []uint32{7}},
		{name: "it has ended", runc: &runcService{state: taskAPI.StateResponse{Pid: 7, Status: task.Status_STOPPED}}},
		{name: "its restore has not begun", runc: &runcService{state: taskAPI.StateResponse{Status: task.Status_CREATED}}},
		{name: "runc fails", runc: &runcService{err: errors.New("on order"), state: taskAPI.StateResponse{Pid: 7, Status: task.Status_RUNNING}}, fails: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &Service{TTRPCTaskService: c.runc}
			resp, err := s.Pids(t.Context(), &taskAPI.PidsRequest{ID: "c"})
			if (err != nil) != c.fails {
				t.Fatalf("error %v, want one: %t", err, c.fails)
			}
			var got []uint32
			for _, p := range resp.GetProcesses() {
				got = append(got, p.Pid)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("it has %v, want %v", got, c.want)
			}
		})
	}
}
