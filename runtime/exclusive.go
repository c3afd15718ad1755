// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
)

// containerd's CRI service has one directory for the checkpoints of a container,
// which it gives CRIU as its work directory, and in which it puts an archive together
// after the container goes on. It removes it when a checkpoint begins and when one
// ends, also one that has failed. So of two at once the second takes the directory
// away from the first, at the latest when it is refused. Here the second is refused
// as early as can be, and the directory is there again when the first goes on.

// errOtherCheckpoint refuses it.
var errOtherCheckpoint = fmt.Errorf("another checkpoint of the container is being made; try again when it is done: %w", errdefs.ErrFailedPrecondition)

// refuseSecond refuses what a second client wants of a container that another has
// paused and is checkpointing. Without it the second would be refused as well, by
// runc's service, but after the first is done.
func (c *container) refuseSecond() error {
	if c.checkpointing.Load() {
		return errOtherCheckpoint
	}
	return nil
}

// claimWorkDir notes the work directory of a checkpoint of a paused container until
// the container goes on, and refuses a second one with the same until then.
func (c *container) claimWorkDir(path string) error {
	if !c.paused || !isTemporary(path) {
		return nil
	}
	if path = filepath.Clean(path); path == c.workPath {
		return errOtherCheckpoint
	}
	c.workPath = path
	return nil
}

// keepWorkDir makes the work directory again if it is gone, before the container
// goes on.
func (c *container) keepWorkDir(ctx context.Context) {
	if c.workPath == "" {
		return
	}
	if err := os.Mkdir(c.workPath, 0o700); err == nil {
		log.G(ctx).WithField("id", c.id).Warnf("%s was gone, taken away by a second checkpoint; it is made again", c.workPath)
	} else if !errors.Is(err, os.ErrExist) && !errors.Is(err, os.ErrNotExist) { // with the container itself
		log.G(ctx).WithError(err).WithField("id", c.id).Warn("make the work directory again")
	}
	c.workPath = ""
}
