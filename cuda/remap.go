// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"errors"
	"sync"
)

// RestoreRemapped is Restore with GPU pairs of each process's own. tries has the
// sets of pairs to try in turn, by pid as the helper counts. The driver accepts
// exactly the GPUs that it counts as the process's (see Helper.Restore), and
// cannot be asked which these are. It refuses any other set, and that changes
// nothing. A process without an entry returns to the GPUs that it had.
//
// taken is the index of the set that each process took, by the same pid.
//
// The error is that of the last try. The group is then checkpointed as before,
// but a process that had come through has as its own the GPUs that it had come to.
func (g Group) RestoreRemapped(ctx context.Context, h *Helper, tries map[int][][]Pair) (taken map[int]int, err error) {
	taken = map[int]int{}
	var mu sync.Mutex
	err = g.found(Running, Locked).step(ctx, h, Checkpointed, h.opts.CopyTimeout, func(ctx context.Context, pid int) error {
		sets := tries[pid]
		if len(sets) == 0 {
			sets = [][]Pair{nil}
		}
		var err error
		for i, pairs := range sets {
			err = restored(ctx, h, pid, pairs)
			if err == nil {
				mu.Lock()
				taken[pid] = i
				mu.Unlock()
			}
			if err == nil || !IsDeviceMapRejected(err) {
				break
			}
		}
		return err
	})
	return taken, err
}

// restored restores one process; one that is not checkpointed any more, because
// somebody has restored it by hand, is done.
func restored(ctx context.Context, h *Helper, pid int, pairs []Pair) error {
	err := h.Restore(ctx, pid, pairs)
	if isIllegalState(err) {
		if s, serr := h.State(ctx, pid); serr == nil && (s == Locked || s == Running) {
			return nil
		}
	}
	return err
}

// IsDeviceMapRejected reports whether the driver refused a restore because of the
// pairs, or because there were none: InvalidValue if they are not exactly the process's GPUs,
// NotSupported if they lead elsewhere than it can go.
func IsDeviceMapRejected(err error) bool {
	var refused *Error
	return errors.As(err, &refused) && (refused.Result == InvalidValue || refused.Result == NotSupported)
}
