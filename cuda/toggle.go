// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"fmt"
	"time"
)

// Toggle takes a running process to checkpointed, or a checkpointed one to
// running, and returns the state it is in afterwards. timeout is the lock's, see
// Helper.Lock; pairs are the restore's. If a step fails the process is brought
// back to the state it had. A process in any other state is refused.
func Toggle(ctx context.Context, h *Helper, pid int, timeout time.Duration, pairs []Pair) (State, error) {
	s, err := h.State(ctx, pid)
	if err != nil {
		return s, err
	}
	// As a group of one that is running when nobody has it in hand.
	group := Group{{PID: PID{Host: pid}, State: Running}}
	if h.opts.Join != 0 {
		group[0].PID = PID{NS: pid}
	}
	switch s {
	case Running:
		if err := group.Lock(ctx, h, timeout); err != nil {
			return Running, err
		}
		if err := group.Checkpoint(ctx, h); err != nil {
			if uerr := group.Unlock(ctx, h); uerr != nil {
				return Locked, fmt.Errorf("%w; undo: %w", err, uerr)
			}
			return Running, err
		}
		return Checkpointed, nil
	case Checkpointed:
		if err := group.Restore(ctx, h, pairs); err != nil {
			return Checkpointed, err
		}
		if err := group.Unlock(ctx, h); err != nil {
			return Locked, err
		}
		return Running, nil
	}
	return s, fmt.Errorf("toggle CUDA process %d: it is %v, neither running nor checkpointed", pid, s)
}
