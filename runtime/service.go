// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"os/exec"
	"runtime/debug"
	"sync"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/task"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/containerd/v2/pkg/shutdown"
	"github.com/containerd/containerd/v2/pkg/sys/reaper"
	"github.com/containerd/containerd/v2/plugins"
	"github.com/containerd/go-runc"
	"github.com/containerd/plugin"
	"github.com/containerd/plugin/registry"
	"github.com/containerd/ttrpc"
	"github.com/containerd/typeurl/v2"

	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/runtime/internal/event"
)

// Service is the task service: runc's, embedded, with some calls overridden.
// Its calls may come concurrently, for one container or for several; those that
// change a container's CUDA state or freezer take turns (container.mu).
type Service struct {
	taskAPI.TTRPCTaskService // runc's

	monitor  monitor
	oom      *host.OOMWatch
	announce *event.Announcer

	mu         sync.Mutex
	containers map[string]*container
}

// Register makes the service the shim's task plugin.
func Register() {
	registry.Register(&plugin.Registration{
		Type:     plugins.TTRPCPlugin,
		ID:       "task",
		Requires: []plugin.Type{plugins.EventPlugin, plugins.InternalPlugin},
		InitFn: func(ic *plugin.InitContext) (any, error) {
			events, err := ic.GetByID(plugins.EventPlugin, "publisher")
			if err != nil {
				return nil, err
			}
			down, err := ic.GetByID(plugins.InternalPlugin, "shutdown")
			if err != nil {
				return nil, err
			}
			return newService(ic.Context, events.(shim.Publisher), down.(shutdown.Service))
		},
	})
}

func newService(ctx context.Context, events shim.Publisher, down shutdown.Service) (*Service, error) {
	inner, err := task.NewTaskService(ctx, events, down)
	if err != nil {
		return nil, err
	}
	s := &Service{
		TTRPCTaskService: inner,
		monitor:          monitor{Monitor: reaper.Default},
		oom:              host.NewOOMWatch(ctx, events),
		announce:         event.New(ctx, events),
		containers:       make(map[string]*container),
	}
	runc.Monitor = &s.monitor
	collectLess()
	go bundle.Warm() // while containerd finds this shim
	return s, nil
}

// collectLess has garbage collected less often than containerd's package for shims, which sets GOGC to 40 and frees
// memory every 30 seconds: a restore reads images into 13 MB, nearly all of it garbage, and 13 collections took half of
// the shim's processor time. The memory limit is for containers with very many files or threads, of which the shim
// reads much in /proc. The bounds of images (criu/image) bound the rest.
func collectLess() {
	debug.SetGCPercent(400)
	debug.SetMemoryLimit(48 << 20)
}

// RegisterTTRPC serves this service rather than the embedded one.
func (s *Service) RegisterTTRPC(server *ttrpc.Server) error {
	taskAPI.RegisterTTRPCTaskService(server, s)
	return nil
}

// container returns what is known of a container; nil for one that was never created
// here. runc's service has the right error for that.
func (s *Service) container(id string) *container {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.containers[id]
}

// reap starts a command under the shim's reaper, which takes the exit status of every
// child of the shim: exec.Cmd's own Wait would find none. The reaper sends each exit to
// all subscribers, and waits a second for one that has not read the last 32 (containerd,
// pkg/sys/reaper). A command may live for days, so its subscription is always read.
func reap(cmd *exec.Cmd) (wait func() (int, error), err error) {
	exits, err := reaper.Default.Start(cmd)
	if err != nil {
		return nil, err
	}
	pid, ended := cmd.Process.Pid, make(chan int, 1)
	go func() {
		defer reaper.Default.Unsubscribe(exits)
		for e := range exits {
			if e.Pid == pid {
				ended <- e.Status
				return
			}
		}
	}()
	return func() (int, error) {
		status := <-ended
		_ = cmd.Wait() // for the command's output; its exit status was reaped elsewhere
		// Its descriptor (pidfd) would stay open until the garbage collector came by.
		_ = cmd.Process.Release()
		return status, nil
	}, nil
}

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
