// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
)

// exclusive keeps two checkpoints of a container that its client has paused from
// disturbing each other.
//
// containerd's CRI service has one directory for the checkpoints of a container. CRIU gets
// it as its work directory, and the service puts an archive together there after the
// container goes on. The service removes the directory when a checkpoint begins and when
// one ends, also one that has failed. So of two at once the second takes the directory
// away from the first, at the latest when it is refused. Here the second is refused as
// early as can be, and the directory is there again when the first goes on.
type exclusive struct {
	running atomic.Bool // a checkpoint is being made; read without container.mu
	workDir string      // that claim has noted
}

// errOtherCheckpoint is the error of the second checkpoint.
var errOtherCheckpoint = fmt.Errorf("another checkpoint of the container is being made; try again when it is done: %w", errdefs.ErrFailedPrecondition)

// refuse refuses what a second client wants of a container while a checkpoint is made of
// it. runc's service would refuse that as well, but after the first is done.
func (e *exclusive) refuse() error {
	if e.running.Load() {
		return errOtherCheckpoint
	}
	return nil
}

// claim notes the work directory of a checkpoint until the container goes on, and refuses
// a second checkpoint with that directory until then.
func (e *exclusive) claim(dir string) error {
	if !isTemporary(dir) {
		return nil
	}
	if dir = filepath.Clean(dir); dir == e.workDir {
		return errOtherCheckpoint
	}
	e.workDir = dir
	return nil
}

// keep makes the work directory again if it is gone, before the container goes on.
func (e *exclusive) keep(ctx context.Context) {
	if e.workDir == "" {
		return
	}
	if err := os.Mkdir(e.workDir, 0o700); err == nil {
		log.G(ctx).Warnf("%s was gone, taken away by a second checkpoint; it is made again", e.workDir)
	} else if !errors.Is(err, os.ErrExist) && !errors.Is(err, os.ErrNotExist) { // with the container itself
		log.G(ctx).WithError(err).Warn("make the work directory again")
	}
	e.workDir = ""
}

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
