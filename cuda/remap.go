// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"errors"
	"sync"
)

// RestoreAllOnto is RestoreAll with GPU pairs of each process's own: tries has,
// by pid, the sets of pairs to try in turn. The driver wants exactly the GPUs
// that it counts as the process's (see Helper.Restore), and cannot be asked
// which these are: a set that is not right is refused and changes nothing. A
// process without an entry returns to the GPUs that it had.
//
// taken says, by pid, which of its sets each process took, counted from 0.
//
// The error is that of the last try. The group is then checkpointed as before
// (see LockAll), but a process that had come through has as its own the GPUs
// that it had come to.
func RestoreAllOnto(ctx context.Context, h *Helper, procs []Process, tries map[int][][]Pair) (taken map[int]int, err error) {
	taken = map[int]int{}
	var mu sync.Mutex
	err = all(ctx, h, only(procs, Running, Locked), Checkpointed, h.opts.CopyTimeout, func(ctx context.Context, pid int) error {
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
			if err == nil || !IsWrongSet(err) {
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

// IsWrongSet says whether the driver refused a restore because of the pairs, or
// for want of any: InvalidValue if they are not exactly the process's GPUs,
// NotSupported if they lead elsewhere than it can go.
func IsWrongSet(err error) bool {
	var refused *Error
	return errors.As(err, &refused) && (refused.Result == InvalidValue || refused.Result == NotSupported)
}
