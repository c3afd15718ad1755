// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/operation/journal"
	"github.com/gpuckpt/gpuckpt/internal/operation/quota"
	"github.com/gpuckpt/gpuckpt/internal/operation/sequence"
	"github.com/gpuckpt/gpuckpt/runtime/internal/gpustate"
	"github.com/gpuckpt/gpuckpt/runtime/internal/suspension"
)

// A suspended container is locked and frozen, and its GPU state is saved as for a
// checkpoint: into memory of the shim or, with a spill, to a disk. Its processes stay
// frozen: they must not run while their GPUs are away. A resume takes the way back
// that a checkpoint takes.
//
// A shim that dies takes the memory with it, and its container too: containerd kills
// a container that has no shim.

// obey does what an Update's annotations ask for. On an error the container is as it
// was.
func (s *Service) obey(ctx context.Context, c *container, want *suspension.Order) error {
	// A change that has begun is not given up with the client, which could not
	// know how it ended.
	ctx = context.WithoutCancel(ctx)
	switch {
	case want.Suspend && c.suspended:
		return fmt.Errorf("the container is suspended already: %w", errdefs.ErrAlreadyExists)
	case want.Suspend:
		began := time.Now()
		err := (&suspending{pausing: pausing{s: s, c: c, read: config.For(c.annotations)}, parent: want.Spill}).run(ctx)
		s.announce.Over(ctx, "suspend", c.id, began, 0, nil, err)
		return err
	case c.suspended:
		return (&resuming{s: s, c: c, gpus: want.GPUs}).run(ctx)
	case c.gpu.Phase() != gpustate.Unlocked && !c.paused && want.GPUs == nil: // an unlock that failed
		_, err := s.resume(ctx, c)
		c.end(ctx, err)
		return err
	}
	return fmt.Errorf("the container is not suspended: %w", errdefs.ErrNotFound)
}

// suspending is one suspension. Its steps leave their results in the container.
type suspending struct {
	pausing
	q      *sequence.Sequence
	parent string // where to spill to; "" for memory
	bytes  uint64 // of save
}

// run takes the container off its GPUs, step by step. It may run or be paused.
func (k *suspending) run(ctx context.Context) error {
	c, spill := k.c, k.parent
	gpu, err := c.hasGPU()
	if err != nil {
		return err
	}
	if !gpu {
		return fmt.Errorf("no process of the container uses CUDA: to stop it, pause it: %w", errdefs.ErrNotFound)
	}
	if spill != "" {
		if err := staging.CheckSpillParent(spill); err != nil {
			return err
		}
	}
	turn, err := quota.TakeMemory(ctx, quota.Who{Operation: "suspend", Container: c.id}, k.read)
	if err != nil {
		return err
	}
	defer turn.Give()
	if err := c.begin(ctx, k.read, journal.Record{Operation: "suspend"}); err != nil {
		return err
	}
	k.q = sequence.New("suspend", c.id)
	k.q.Journal = &c.journal
	defer func() { k.q.Save(ctx, c.bundle); c.end(ctx, k.q.Stuck) }()
	defer c.execs.Close()() // what comes meanwhile waits, and is refused if the container is suspended then
	var steps []sequence.Step
	if !c.paused {
		steps = append(steps, sequence.Step{Name: "pause", Do: k.pause, Back: "resume", Undo: k.resume})
	}
	steps = append(steps, sequence.Step{Name: "preflight", Do: k.preflight})
	if spill != "" {
		steps = append(steps, sequence.Step{Name: "make spill directory", Do: k.makeSpillDir, Back: "remove spill directory", Undo: k.removeSpillDir})
	}
	steps = append(steps, sequence.Step{Name: "save GPU state", Do: k.save, Back: "give GPU state back", Undo: k.giveBack})
	if spill != "" {
		steps = append(steps, sequence.Step{Name: "spill", Do: k.spill})
	}
	if err := k.q.Run(ctx, steps...); err != nil {
		return err
	}
	c.suspended = true
	c.gpu.Close()
	log.G(ctx).WithFields(log.Fields{"bytes": k.bytes, "spill": spill}).Info("suspended")
	return nil
}

// pause waits before it pauses until exec'd processes that are on their way are in the container, such as probes: in
// a paused one they never arrive.
func (k *suspending) pause(ctx context.Context) (uint64, error) {
	view, err := k.read()
	if err != nil {
		return 0, err
	}
	if err := k.c.execs.Settle(ctx, time.Duration(view.LockTimeout)); err != nil {
		return 0, err
	}
	return k.pausing.pause(ctx)
}

// preflight refuses what cannot work before anything is touched.
func (k *suspending) preflight(ctx context.Context) (uint64, error) {
	if err := k.c.requireLock(k.q); err != nil {
		return 0, err
	}
	return 0, k.c.gpu.Preflight(ctx, k.parent)
}

func (k *suspending) makeSpillDir(ctx context.Context) (_ uint64, err error) {
	k.c.spill, err = staging.MakeSpillDir(k.parent, k.c.namespace+"-"+k.c.id, k.c.bundle)
	k.c.journal.Spills(ctx, k.c.spillDir())
	if err == nil {
		err = k.c.journal.FlushBeside()() // what will be there is flushed, too
	}
	return 0, err
}

func (k *suspending) removeSpillDir(ctx context.Context) error {
	if k.c.gpu.Phase() == gpustate.Spilled {
		return fmt.Errorf("%s has the GPU state, and stays until that is back", k.c.spillDir())
	}
	k.c.removeSpill(ctx)
	return nil
}

func (k *suspending) save(ctx context.Context) (_ uint64, err error) {
	k.bytes, err = k.c.gpu.Save(ctx, k.c.spillDir(), gpustate.Suspended)
	return k.bytes, k.s.endLost(ctx, k.c, err)
}

func (k *suspending) spill(ctx context.Context) (uint64, error) {
	return k.c.gpu.Spill(ctx, k.c.spillDir())
}

// spillDir returns the directory of the spilled state; "" for none.
func (c *container) spillDir() string {
	if c.spill == nil {
		return ""
	}
	return c.spill.Path
}

// removeSpill removes what a spill has left on the disk. An error is for the log.
func (c *container) removeSpill(ctx context.Context) {
	if c.spill == nil {
		return
	}
	if err := c.spill.Remove(); err != nil {
		log.G(ctx).WithError(err).Warn("remove the spilled GPU state")
		return
	}
	c.spill = nil
}

// resuming is one resume of a suspended container. Its steps leave their results in it.
type resuming struct {
	s    *Service
	c    *container
	gpus []string      // by name; nil for those that it had
	move gpustate.Move // of chooseGPUs
}

// run returns a suspended container to GPUs, step by step: those named, or the ones that
// it had. The container then runs, also if it was paused when it was suspended. On an
// error it stays suspended, and can be resumed again, or has ended, and the error says so.
func (k *resuming) run(ctx context.Context) (err error) {
	c, began := k.c, time.Now()
	defer func() { k.s.announce.Over(ctx, "resume", c.id, began, 0, nil, err) }()
	turn, err := quota.TakeMemory(ctx, quota.Who{Operation: "resume", Container: c.id}, config.For(c.annotations))
	if err != nil {
		return err
	}
	defer turn.Give()
	c.beginAnyway(ctx, config.For(c.annotations), "resume")
	q := sequence.New("resume", c.id)
	q.Journal = &c.journal
	defer func() { q.Save(ctx, c.bundle); c.end(ctx, q.Stuck) }()
	defer func() {
		if c.suspended {
			c.gpu.Close()
		}
	}()
	return q.Run(ctx,
		sequence.Step{Name: "choose GPUs", Do: k.chooseGPUs},
		sequence.Step{Name: "check spill", Do: c.gpu.CheckSpilled},
		sequence.Step{Name: "give access", Do: k.grant, Back: "take access away", Undo: k.revoke, UntilComplete: true},
		sequence.Step{Name: "give GPU state back", Do: k.restoreInPlace, Completes: true},
		sequence.Step{Name: "thaw and unlock", Do: k.goOn},
	)
}

func (k *resuming) chooseGPUs(ctx context.Context) (_ uint64, err error) {
	k.move, err = k.c.gpu.ChooseGPUs(ctx, k.gpus)
	return 0, err
}

func (k *resuming) grant(context.Context) (uint64, error) {
	return 0, k.c.devices.Grant(k.c.pid, nodePaths(k.move.Grant))
}

func (k *resuming) revoke(context.Context) error {
	if k.c.ended {
		return nil
	}
	return k.c.devices.Revoke(k.c.pid, nodePaths(k.move.Grant), nodePaths(k.move.Had))
}

func (k *resuming) restoreInPlace(ctx context.Context) (uint64, error) {
	bytes := k.c.gpu.Facts().AreaBytes
	err := k.s.endLost(ctx, k.c, k.c.gpu.RestoreInPlace(ctx))
	if errors.Is(err, gpustate.ErrLost) {
		return 0, err
	}
	if err != nil && k.c.gpu.Phase() != gpustate.Locked {
		return 0, fmt.Errorf("the container stays suspended (resume it again to retry): %w", err)
	}
	if err != nil { // a tracer that died in the end: the threads that it held are to run now
		log.G(ctx).WithError(err).Warn("the GPU state is back; what followed failed")
	}
	k.c.suspended = false
	return bytes, nil
}

// goOn removes what is left of the suspension, and lets the container run.
func (k *resuming) goOn(ctx context.Context) (uint64, error) {
	k.c.removeSpill(ctx)
	if err := k.c.devices.Revoke(k.c.pid, nodePaths(k.move.Revoke), nodePaths(k.move.Grant)); err != nil {
		log.G(ctx).WithError(err).Warn("the container still has access to GPUs that it left")
	}
	k.c.request.Replace(minorsOf(k.move.Revoke), minorsOf(k.move.Grant))
	_, err := k.s.resume(ctx, k.c)
	return 0, err
}

func nodePaths(gpus []cuda.GPU) (paths []string) {
	for _, d := range gpus {
		paths = append(paths, cdi.NodePath(d.Minor))
	}
	return paths
}

func minorsOf(gpus []cuda.GPU) (minors []int) {
	for _, d := range gpus {
		minors = append(minors, d.Minor)
	}
	return minors
}
