// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
)

// A group is the CUDA processes of one container. Its steps act on all of them
// at once, because the driver serves processes in parallel (two processes of
// 16 GiB on two GPUs: 5.9 s at once, 12.2 s in turn).
//
// Process.State, the state in which Find saw a process, is the state that the
// group gives it back in. A process that somebody had locked by hand is
// checkpointed and restored with the others, but LockAll does not lock it and
// UnlockAll leaves it locked. One that was already checkpointed stays
// checkpointed throughout: no step touches it.
//
// When a step fails for one process, or its context ends, the step is undone
// for all, on a context of its own (Options.CopyTimeout), and the group is as
// before the step; if the undoing fails as well, the error says so and for
// which process. If the helper is lost, undoing uses a fresh one like it.

// LockAll takes the running processes of a group to locked. timeout is each
// one's, see Helper.Lock. It refuses a group with a process that is failed or
// in the middle of another's step, before it touches any.
func LockAll(ctx context.Context, h *Helper, procs []Process, timeout time.Duration) error {
	for _, p := range procs {
		if p.State != Running && p.State != Locked && p.State != Checkpointed {
			return fmt.Errorf("lock CUDA process %d: it is %v", p.PID, p.State)
		}
	}
	return all(ctx, h, only(procs, Running), Running, timeout+h.opts.CallTimeout, func(ctx context.Context, pid int) error {
		return h.Lock(ctx, pid, timeout)
	})
}

// CheckpointAll takes the locked processes of a group to checkpointed.
func CheckpointAll(ctx context.Context, h *Helper, procs []Process) error {
	return all(ctx, h, only(procs, Running, Locked), Locked, h.opts.CopyTimeout, h.Checkpoint)
}

// RestoreAll takes back to locked the processes of a group that CheckpointAll
// took to checkpointed. pairs as in Helper.Restore, the same for each process;
// nil returns each to the GPUs it had.
//
// A process that is not checkpointed any more, because somebody has restored it
// by hand, is done: the driver says so at once.
func RestoreAll(ctx context.Context, h *Helper, procs []Process, pairs []Pair) error {
	return all(ctx, h, only(procs, Running, Locked), Checkpointed, h.opts.CopyTimeout, func(ctx context.Context, pid int) error {
		return restored(ctx, h, pid, pairs)
	})
}

// UnlockAll takes back to running the processes of a group that LockAll took to
// locked. It is never undone, since an unlocked process has gone on: it unlocks
// as many as it can and then says which it could not. A process that somebody
// has unlocked by hand, or that has ended, is done. It goes on when ctx ends.
func UnlockAll(ctx context.Context, h *Helper, procs []Process) error {
	ctx = context.WithoutCancel(ctx)
	return sum(each(only(procs, Running), func(p Process) error {
		err := h.Unlock(ctx, p.PID)
		if isIllegalState(err) {
			if s, serr := h.State(ctx, p.PID); serr == nil && s == Running {
				return nil
			}
		}
		return ended(h, p.PID, err)
	}))
}

// isIllegalState says whether the driver refused a step because of the state
// that the process is in.
func isIllegalState(err error) bool {
	var refused *Error
	return errors.As(err, &refused) && refused.Result == IllegalState
}

// only picks the processes that were found in one of the states.
func only(procs []Process, states ...State) []Process {
	var picked []Process
	for _, p := range procs {
		for _, s := range states {
			if p.State == s {
				picked = append(picked, p)
			}
		}
	}
	return picked
}

// each calls do for all processes at once and gives their errors in order.
func each(procs []Process, do func(Process) error) []error {
	errs := make([]error, len(procs))
	var wg sync.WaitGroup
	for i, p := range procs {
		wg.Add(1)
		go func() {
			defer wg.Done()
			errs[i] = do(p)
		}()
	}
	wg.Wait()
	return errs
}

// all takes one step for all processes at once, each within limit. If it fails
// for any, it brings all of them back to the state before.
func all(ctx context.Context, h *Helper, procs []Process, before State, limit time.Duration, step func(context.Context, int) error) error {
	errs := each(procs, func(p Process) error { return step(ctx, p.PID) })
	err := sum(errs)
	if err == nil || neverUp(err) {
		return err
	}
	if uerr := undo(context.WithoutCancel(ctx), h, procs, errs, before, limit); uerr != nil {
		return fmt.Errorf("%w; undo: %w", err, uerr)
	}
	return err
}

// neverUp says whether an error is that the driver was not initialised: no process
// was asked for anything.
func neverUp(err error) bool {
	var refused *Error
	return errors.As(err, &refused) && refused.Op == opInit
}

// undo brings processes back to a state after a step that ended with errs and
// was to take no longer than limit.
func undo(ctx context.Context, h *Helper, procs []Process, errs []error, before State, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, h.opts.CopyTimeout)
	defer cancel()
	select {
	case <-h.down:
		fresh, err := Start(ctx, h.opts)
		if err != nil {
			return err
		}
		defer fresh.Close()
		h = fresh
	default:
	}
	lost := map[int]bool{} // whose call may still be under way in the process
	for i, err := range errs {
		var refused *Error
		if err != nil && !errors.As(err, &refused) {
			lost[procs[i].PID] = true
		}
	}
	return sum(each(procs, func(p Process) error {
		if lost[p.PID] {
			if err := settle(ctx, h, p.PID, limit); err != nil {
				return ended(h, p.PID, err)
			}
		}
		return ended(h, p.PID, bring(ctx, h, p.PID, before))
	}))
}

// settle waits until a process has ended a call whose caller was lost: the call
// goes on in the process's own driver thread, and State need not show it. That
// thread serves one call at a time, so a lock comes through only afterwards. It
// either fails because of the state the process is in, or leaves it locked;
// bring takes it from there.
func settle(ctx context.Context, h *Helper, pid int, limit time.Duration) error {
	barrier := wire.Request{Op: wire.OpLock, PID: pid, TimeoutMS: 1000}
	var refused *Error
	if _, err := h.do(ctx, barrier, limit); err != nil && !errors.As(err, &refused) {
		return err
	}
	// Newer drivers say so when they are still at it.
	for {
		s, err := h.State(ctx, pid)
		if err != nil || s != Checkpointing && s != Restoring {
			return err
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("wait for CUDA process %d: %w", pid, ctx.Err())
		}
	}
}

// bring takes a process to running, locked or checkpointed, step by step from
// whichever of them it is in.
func bring(ctx context.Context, h *Helper, pid int, want State) error {
	const attempts = 4 // two steps lie between the farthest states
	for range attempts {
		s, err := h.State(ctx, pid)
		if err != nil {
			return err
		}
		switch {
		case s == want:
			return nil
		case s == Running:
			err = h.Lock(ctx, pid, h.opts.CallTimeout)
		case s == Checkpointed:
			err = h.Restore(ctx, pid, nil)
		case s == Locked && want == Running:
			err = h.Unlock(ctx, pid)
		case s == Locked:
			err = h.Checkpoint(ctx, pid)
		default:
			return fmt.Errorf("bring CUDA process %d to %v: it is %v", pid, want, s)
		}
		if err != nil {
			return err
		}
	}
	return fmt.Errorf("bring CUDA process %d to %v: it changes its state by itself", pid, want)
}

// ended makes the end of a process no error: there is nothing left to undo.
func ended(h *Helper, pid int, err error) error {
	if err == nil || errors.Is(err, ErrNotCUDA) {
		return nil
	}
	if h.opts.Join != 0 {
		return err // its pids are not this program's
	}
	// The driver answers OPERATING_SYSTEM, among others, about a process that has
	// ended; /proc knows, also of a zombie.
	if may, perr := MayUse(pid); perr == nil && !may {
		return nil
	}
	return err
}
