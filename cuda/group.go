// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
	"github.com/gpuckpt/gpuckpt/internal/node/worker"
)

// Group is the CUDA processes of one container. Its steps act on all of them at once, as the driver
// can (two of 16 GiB on two GPUs: 5.9 s at once, 12.2 s in turn).
//
// Each process is left in the end in the state in which Find saw it (Process.State). One that
// somebody had locked by hand is checkpointed and restored with the others, but neither locked nor
// unlocked. One that was already checkpointed stays so throughout.
//
// When a step fails for one process, or its context ends, it is undone for all, on a context of its
// own (Options.CopyTimeout), with a fresh helper if this one is lost. If the undoing fails as well,
// the error says so and for which process.
type Group []Process

// Lock takes the running processes to locked, all within timeout, see Helper.Lock. Processes whose
// work on their GPUs waits for each other are let go and locked again until all stand still. Before it
// touches any, Lock refuses a group with one that is failed or in the middle of another's step.
func (g Group) Lock(ctx context.Context, h *Helper, timeout time.Duration) error {
	for _, p := range g {
		if p.State != Running && p.State != Locked && p.State != Checkpointed {
			return fmt.Errorf("lock CUDA process %d: it is %v", h.number(p.PID), p.State)
		}
	}
	running := g.found(Running)
	if len(running) > 1 {
		if timeout <= 0 {
			timeout = h.opts.CopyTimeout
		}
		return running.lockAll(ctx, h, timeout)
	}
	return running.step(ctx, h, Running, timeout+h.opts.CallTimeout, func(ctx context.Context, p PID) error {
		return h.Lock(ctx, h.number(p), timeout)
	})
}

// Checkpoint takes the locked processes of the group to checkpointed.
func (g Group) Checkpoint(ctx context.Context, h *Helper) error {
	g = g.found(Running, Locked)
	return g.step(ctx, h, Locked, h.opts.CopyTimeout, func(ctx context.Context, p PID) error {
		return explained(p, h.copies(ctx, wire.Request{Op: wire.OpCheckpoint, PID: h.number(p)}, g.whileAnyWorks(h)))
	})
}

// Restore takes back to locked the processes that Checkpoint took to checkpointed. pairs are as in
// Helper.Restore, the same for each process; nil returns each to the GPUs it had.
//
// A process that somebody has restored by hand is done: the driver says so at once.
func (g Group) Restore(ctx context.Context, h *Helper, pairs []Pair) error {
	tries := map[int][][]Pair{}
	for _, p := range g {
		tries[h.number(p.PID)] = [][]Pair{pairs}
	}
	_, err := g.RestoreRemapped(ctx, h, tries)
	return err
}

// RestoreRemapped is Restore with GPU pairs of each process's own: tries has the sets to try in
// turn, by pid as the helper counts. The driver accepts exactly the GPUs that it counts as the
// process's, and cannot be asked which; a set that it refuses changes nothing. A process without an
// entry returns to its GPUs. taken is the index of the set that each process took, by the same pid.
//
// The error is that of the last try. The group is then checkpointed as before, but a process that
// had come through has as its own the GPUs that it had come to.
func (g Group) RestoreRemapped(ctx context.Context, h *Helper, tries map[int][][]Pair) (taken map[int]int, err error) {
	taken = map[int]int{}
	var mu sync.Mutex
	g = g.found(Running, Locked)
	err = g.step(ctx, h, Checkpointed, h.opts.CopyTimeout, func(ctx context.Context, p PID) error {
		pid := h.number(p)
		if tries[pid] == nil {
			return g.restored(ctx, h, p, nil)
		}
		var err error
		for i, pairs := range tries[pid] {
			if err = g.restored(ctx, h, p, pairs); err == nil {
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

// Hosts returns the pids of the processes on the host.
func (g Group) Hosts() (pids []int) {
	for _, p := range g {
		pids = append(pids, p.PID.Host)
	}
	return pids
}

// whileAnyWorks is the limit of a call in which the driver copies GPU memory of one of the processes,
// while it copies that of the others.
func (g Group) whileAnyWorks(h *Helper) worker.Limit { return h.whileTheyWork(g.Hosts()) }

func (g Group) restored(ctx context.Context, h *Helper, p PID, pairs []Pair) error {
	pid := h.number(p)
	err := h.copies(ctx, wire.Request{Op: wire.OpRestore, PID: pid, Pairs: pairs}, g.whileAnyWorks(h))
	if isRefusal(err, IllegalState) {
		if s, serr := h.State(ctx, pid); serr == nil && (s == Locked || s == Running) {
			return nil
		}
	}
	return explained(p, err)
}

// explained says of a driver's refusal that the process has ended, which the driver does not say. It
// copies by a thread of the process, which gets SIGBUS where a file cannot be read.
func explained(p PID, err error) error {
	if refused, ok := errors.AsType[*Error](err); ok && refused.Result == OperatingSystem && p.Host != 0 && len(Group{{PID: p}}.Living()) == 0 {
		refused.Hint = "the process has ended: it was killed, for its memory perhaps, or its GPU state could not be read from a disk (SIGBUS) or written to one; see the kernel's log"
	}
	return err
}

// IsDeviceMapRejected reports whether the driver refused a restore because of the pairs, or because
// there were none: InvalidValue if they are not exactly the process's GPUs, NotSupported if they
// lead elsewhere than it can go.
func IsDeviceMapRejected(err error) bool { return isRefusal(err, InvalidValue, NotSupported) }

func isRefusal(err error, results ...Result) bool {
	refused, ok := errors.AsType[*Error](err)
	return ok && slices.Contains(results, refused.Result)
}

// Unlock takes back to running the processes that Lock took to locked. It is never undone, since an
// unlocked process has run on: it unlocks as many as it can and says which it could not. One that
// somebody has unlocked by hand, or that has ended, is done. It ignores the end of ctx.
func (g Group) Unlock(ctx context.Context, h *Helper) error {
	ctx = context.WithoutCancel(ctx)
	return sum(g.found(Running).each(func(p Process) error {
		pid := h.number(p.PID)
		err := h.Unlock(ctx, pid)
		if isRefusal(err, IllegalState) {
			if s, serr := h.State(ctx, pid); serr == nil && s == Running {
				return nil
			}
		}
		return ended(p.PID, err)
	}))
}

// Living returns the processes that have not ended.
func (g Group) Living() Group {
	return slices.DeleteFunc(slices.Clone(g), func(p Process) bool {
		may, err := MayUseCUDA(p.PID.Host)
		return err == nil && !may
	})
}

func (g Group) found(states ...State) Group {
	return slices.DeleteFunc(slices.Clone(g), func(p Process) bool { return !slices.Contains(states, p.State) })
}

func (g Group) each(do func(Process) error) []error {
	return atOnce(len(g), func(i int) error { return do(g[i]) })
}

// atOnce calls do n times at once and returns the errors in order.
func atOnce(n int, do func(i int) error) []error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = do(i) })
	}
	wg.Wait()
	return errs
}

// step takes all processes through one step at once, within limit, or brings all back to before.
func (g Group) step(ctx context.Context, h *Helper, before State, limit time.Duration, do func(context.Context, PID) error) error {
	errs := g.each(func(p Process) error { return do(ctx, p.PID) })
	return g.undone(ctx, h, sum(errs), errs, before, limit)
}

// undone undoes a step of that limit that ended with err, by process with errs, and returns the error.
func (g Group) undone(ctx context.Context, h *Helper, err error, errs []error, before State, limit time.Duration) error {
	if refused, ok := errors.AsType[*Error](err); err == nil || ok && refused.Op == opInit {
		return err // or no process was asked for anything
	}
	if uerr := g.undo(context.WithoutCancel(ctx), h, errs, before, limit); uerr != nil {
		return fmt.Errorf("%w; undo: %w", err, uerr)
	}
	return err
}

// undo brings the processes back to a state after a step of that limit ended with errs.
func (g Group) undo(ctx context.Context, h *Helper, errs []error, before State, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, h.opts.CopyTimeout)
	defer cancel()
	if !h.Alive() {
		fresh, err := Start(ctx, h.opts)
		if err != nil {
			return err
		}
		defer fresh.Close()
		h = fresh
	}
	lost := map[PID]bool{} // whose call may still be under way in the process
	for i, err := range errs {
		if _, refused := errors.AsType[*Error](err); err != nil && !refused {
			lost[g[i].PID] = true
		}
	}
	copying := g.whileAnyWorks(h)
	return sum(g.each(func(p Process) error {
		if lost[p.PID] {
			wait := worker.Limit{Most: limit}
			if before != Running { // a copy that goes on
				wait = copying
			}
			if err := settle(ctx, h, h.number(p.PID), wait); err != nil {
				return ended(p.PID, err)
			}
		}
		return ended(p.PID, driveTo(ctx, h, h.number(p.PID), before, copying))
	}))
}

// settle waits until a process has ended a call whose caller was lost, which State need not show.
// The call goes on in the driver's thread of the process, which serves one at a time. So a lock is
// served only afterwards: it fails because of the state, or leaves the process locked.
func settle(ctx context.Context, h *Helper, pid int, limit worker.Limit) error {
	barrier := wire.Request{Op: wire.OpLock, PID: pid, TimeoutMS: 1000}
	_, err := h.within(ctx, barrier, limit)
	if _, refused := errors.AsType[*Error](err); err != nil && !refused {
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

// driveTo takes a process from any of running, locked and checkpointed to another, step by step.
// copying is the limit of a step that copies GPU memory.
func driveTo(ctx context.Context, h *Helper, pid int, want State, copying worker.Limit) error {
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
			err = h.copies(ctx, wire.Request{Op: wire.OpRestore, PID: pid}, copying)
		case s == Locked && want == Running:
			err = h.Unlock(ctx, pid)
		case s == Locked:
			err = h.copies(ctx, wire.Request{Op: wire.OpCheckpoint, PID: pid}, copying)
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
func ended(p PID, err error) error {
	if err == nil || errors.Is(err, ErrNotCUDA) {
		return nil
	}
	// The driver answers OPERATING_SYSTEM, among others; /proc knows, also of a zombie.
	if p.Host != 0 && len(Group{{PID: p}}.Living()) == 0 {
		return nil
	}
	return err
}

// Toggle takes a running process to checkpointed, or a checkpointed one to running, and returns its
// state afterwards. timeout is the lock's, see Helper.Lock; pairs are the restore's. If a step
// fails the process is brought back. A process in any other state is refused.
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
