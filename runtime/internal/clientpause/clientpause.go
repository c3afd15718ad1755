// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package clientpause keeps two checkpoints of a container that its client has paused from disturbing
// each other.
//
// containerd's CRI service has one directory for the checkpoints of a container. CRIU gets it as its
// work directory, and the service puts an archive together there after the container goes on. The
// service removes the directory when a checkpoint begins and when one ends, also one that has failed.
// So of two at once the second takes the directory away from the first, at the latest when it is
// refused. Here the second is refused as early as can be, and the directory is there again when the
// first goes on.
//
// Nor is a container suspended then: the client's resume would undo it.
//
// The life of a Checkpoints, whose zero value is ready, during a pause: Begin and End around each
// checkpoint, Claim in it, Keep before the container goes on, GoesOn afterwards. Lock and LockToSuspend may be called at
// any time, the others only by whoever has the container for itself.
package clientpause

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/internal/operation/imagedir"
)

// Checkpoints are those of one container.
type Checkpoints struct {
	running atomic.Bool
	workDir string // that Claim has noted
	claimed bool   // by the checkpoint that is being made
	made    bool   // one was, and the container has not gone on yet
}

// ErrOther is the error of the second checkpoint.
var ErrOther = fmt.Errorf("another checkpoint of the container is being made; try again when it is done: %w", errdefs.ErrFailedPrecondition)

// ErrPaused is the error of a suspension that the resume after a checkpoint would undo.
var ErrPaused = fmt.Errorf("the container is paused for a checkpoint, whose client resumes it: try again then, or if the client has died, after `ctr tasks resume`: %w", errdefs.ErrFailedPrecondition)

// Begin notes that a checkpoint is being made of a container, if its client has paused it.
func (e *Checkpoints) Begin(paused bool) {
	e.claimed = false
	e.running.Store(paused)
}

// End notes that the checkpoint is over. What one has claimed that has failed may be claimed again, by
// whoever makes the directory.
func (e *Checkpoints) End(err error) {
	if err != nil && e.claimed {
		e.workDir = ""
	}
	e.made = e.made || err == nil && e.running.Load()
	e.running.Store(false)
}

// lookEvery is how often Lock looks whether a checkpoint has begun.
const lookEvery = time.Millisecond

// Lock locks the container's mutex, or returns ErrOther as soon as a checkpoint is made of a container
// that its client has paused: also one that begins while Lock waits. runc's service would refuse a
// second client as well, but after the first is done, and that one's directory would be taken away too
// late to be made again.
func (e *Checkpoints) Lock(container *sync.Mutex) error {
	for ; ; time.Sleep(lookEvery) {
		if e.running.Load() {
			return ErrOther
		}
		if container.TryLock() {
			return nil
		}
	}
}

// LockToSuspend locks like Lock, or returns ErrPaused from the begin of a checkpoint until the client has
// resumed the container that it had paused.
func (e *Checkpoints) LockToSuspend(container *sync.Mutex) error {
	if e.Lock(container) != nil {
		return ErrPaused
	}
	if e.made {
		container.Unlock()
		return ErrPaused
	}
	return nil
}

// Claim notes the work directory of a checkpoint until the container goes on, and returns ErrOther for
// a second checkpoint with that directory until then.
func (e *Checkpoints) Claim(dir string) error {
	if !imagedir.IsTemporary(dir) {
		return nil
	}
	if dir = filepath.Clean(dir); dir == e.workDir {
		return ErrOther
	}
	e.workDir, e.claimed = dir, true
	return nil
}

// Keep makes the work directory again if it is gone, before the container goes on. That it cannot be
// made is logged.
func (e *Checkpoints) Keep(ctx context.Context) {
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

// GoesOn notes that the container has gone on.
func (e *Checkpoints) GoesOn() { e.made = false }
