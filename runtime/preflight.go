// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/gpustate"
	"github.com/gpuckpt/gpuckpt/internal/sequence"
)

// requireLock refuses a container whose CUDA processes are not locked. It notes
// in the sequence how long the lock took.
func (c *container) requireLock(q *sequence.Sequence) error {
	if c.lockErr != nil {
		return fmt.Errorf("the container's CUDA processes could not be locked when it was paused: %w", c.lockErr)
	}
	if c.gpu.Phase() == gpustate.Unlocked {
		return fmt.Errorf("the container began to use CUDA while it was being paused; resume it and try again: %w", errdefs.ErrFailedPrecondition)
	}
	q.Note(images.Phase{Name: "lock", Took: c.gpu.Facts().LockTook})
	return nil
}
