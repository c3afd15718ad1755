// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"fmt"
	"sync/atomic"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"
)

// execs keeps processes from being exec'd into a container while the driver's
// threads run in it. It is thawed then, so that runc, which refuses a container
// that is paused, would let them in: a probe of the kubelet's, say. Nothing
// would hold them, and no dump has them.
type execs struct {
	starting atomic.Int32 // starts under way
	closed   atomic.Int32 // by how many none is to begin
}

// close keeps further processes out until reopen is called.
func (e *execs) close() (reopen func()) {
	e.closed.Add(1)
	return func() { e.closed.Add(-1) }
}

// refuseStarting refuses while one is on its way in: it may have asked runc
// before the container was paused.
func (e *execs) refuseStarting() error {
	if e.starting.Load() > 0 {
		return fmt.Errorf("a process is being exec'd into the container: try again: %w", errdefs.ErrUnavailable)
	}
	return nil
}

// start has runc's service start an exec'd process.
func (e *execs) start(ctx context.Context, runc taskAPI.TTRPCTaskService, r *taskAPI.StartRequest) (*taskAPI.StartResponse, error) {
	e.starting.Add(1)
	defer e.starting.Add(-1)
	if e.closed.Load() > 0 {
		return nil, toGRPC(fmt.Errorf("cannot exec in a container while its GPU state is saved or given back: try again: %w", errdefs.ErrFailedPrecondition))
	}
	return runc.Start(ctx, r)
}
