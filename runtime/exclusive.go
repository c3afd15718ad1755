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

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/internal/imagedir"
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
	if !imagedir.IsTemporary(dir) {
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
