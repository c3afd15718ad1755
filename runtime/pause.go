// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/task"
	ptypes "github.com/containerd/containerd/v2/pkg/protobuf/types"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/fault"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
	"github.com/gpuckpt/gpuckpt/internal/operation/sequence"
	"github.com/gpuckpt/gpuckpt/runtime/internal/denied"
	"github.com/gpuckpt/gpuckpt/runtime/internal/gpustate"
	"github.com/gpuckpt/gpuckpt/runtime/internal/hooks"
)

// Pause locks the container's CUDA processes, if it has any, and freezes it.
// It freezes a container that cannot be locked as well, since a pause is all
// that was asked for: a Checkpoint that follows says why there was no lock.
func (s *Service) Pause(ctx context.Context, r *taskAPI.PauseRequest) (*ptypes.Empty, error) {
	c := s.container(r.ID)
	if c == nil {
		return s.TTRPCTaskService.Pause(ctx, r)
	}
	if err := c.exclusive.Lock(&c.mu); err != nil {
		return nil, toGRPC(err)
	}
	defer c.mu.Unlock()
	ctx = c.logged(ctx)
	if c.suspended {
		return nil, toGRPC(fmt.Errorf("cannot pause a suspended container: resume it first: %w", errdefs.ErrFailedPrecondition))
	}
	k := &pausing{s: s, c: c, read: config.For(c.annotations)}
	if !c.paused {
		c.beginAnyway(ctx, k.read, "pause")
		candidates, err := c.candidates()
		gpu := err == nil && len(candidates) > 0
		if c.hears(gpu) {
			k.tell(ctx)
		}
		if gpu {
			k.drainExecs(ctx)
		}
	}
	resp, err := s.pause(ctx, c, k.read)
	if !c.paused {
		c.goesOn(ctx)
	}
	c.end(ctx, nil)
	return resp, toGRPC(err)
}

// Resume thaws the container and unlocks its CUDA processes. What is left of a
// checkpoint whose way back failed is tried again first. On an error before
// the thaw the container stays paused; on one after it, it runs with its CUDA
// calls blocked, and Resume may be called again. A container whose GPU state the driver does
// not give back has ended. It goes on when the client does not wait for it.
func (s *Service) Resume(ctx context.Context, r *taskAPI.ResumeRequest) (*ptypes.Empty, error) {
	c := s.container(r.ID)
	if c == nil {
		return s.TTRPCTaskService.Resume(ctx, r)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	ctx = c.logged(ctx)
	if c.suspended {
		return &ptypes.Empty{}, toGRPC((&resuming{s: s, c: c}).run(context.WithoutCancel(ctx)))
	}
	c.exclusive.Keep(ctx)
	began := time.Now()
	resp, err := s.resume(context.WithoutCancel(ctx), c)
	if c.end(ctx, err); errors.Is(err, gpustate.ErrLost) {
		s.announce.Over(ctx, "resume", c.id, began, 0, nil, err)
	}
	return resp, toGRPC(err)
}

// runcWithin bounds a runc that freezes or thaws: it waits for processes ten seconds at most.
const runcWithin = time.Minute

// pause locks and freezes. On an error the container is as it was.
func (s *Service) pause(ctx context.Context, c *container, read config.Source) (*ptypes.Empty, error) {
	if c.gpu.Phase() == gpustate.Unlocked && !c.paused && c.pid != 0 {
		if c.lockErr = c.lock(ctx, read); c.lockErr != nil {
			log.G(ctx).WithError(c.lockErr).Warn("pausing without the CUDA lock: the container cannot be checkpointed until it is resumed and paused again")
		}
	}
	// Not given up once begun: whether the container is frozen must be known.
	within, cancel := context.WithTimeout(context.WithoutCancel(ctx), fault.Bound(runcWithin))
	defer cancel()
	resp, err := host.RetryFreeze(c.pid, func() (*ptypes.Empty, error) {
		return s.TTRPCTaskService.Pause(within, &taskAPI.PauseRequest{ID: c.id})
	})
	if err == nil {
		c.paused = true
		if cg, cerr := host.CgroupOf(c.pid); cerr == nil { // nobody finds it by a process that has ended
			c.frozen.Store(cg)
		}
	} else if !c.paused {
		// If runc has frozen it and a child of vfork could not be waited for, runc takes it for a paused one.
		_, _ = s.TTRPCTaskService.Resume(context.WithoutCancel(ctx), &taskAPI.ResumeRequest{ID: c.id})
		if cg, cerr := host.CgroupOf(c.pid); cerr == nil { // a runc that was killed may have frozen it
			err = sequence.Join(err, cg.Thaw())
		}
		if ended := denied.RefuseEnded(c.pid); ended != nil {
			err = fmt.Errorf("%w: %w", ended, errgrpc.ToNative(err))
		}
		if within.Err() != nil {
			err = fmt.Errorf("runc hangs, and was killed: %w", err)
		}
		if uerr := c.unlock(context.WithoutCancel(ctx)); uerr != nil {
			log.G(ctx).WithError(uerr).Error("unlock after a failed pause")
		}
	}
	return resp, errgrpc.ToNative(err)
}

// pausing is the step that pauses for a client that has not, and its undo.
type pausing struct {
	s    *Service
	c    *container
	read config.Source // of the operation
	told hooks.Hooks   // of the container; none for a suspension
}

// tell tells the program what a checkpoint would before its pause, since one may follow. A pause does not
// fail by it.
func (p *pausing) tell(ctx context.Context) {
	p.told, p.c.hookErr = p.c.readHooks(p.read)
	if p.c.hookErr == nil {
		p.c.hookErr = p.tellBefore(ctx)
	}
	if p.c.hookErr == nil {
		p.c.told = p
	} else {
		log.G(ctx).WithError(p.c.hookErr).Warn("pausing a program that is not ready for a checkpoint: the container cannot be checkpointed until it is resumed and paused again")
	}
}

// drainExecs waits for exec'd processes as a checkpoint would. A pause does not fail by it either.
func (p *pausing) drainExecs(ctx context.Context) {
	if _, err := p.holdExecs(ctx); err != nil {
		log.G(ctx).WithError(err).Warn("pausing beside exec'd processes: the container cannot be checkpointed until they have ended")
		p.c.execs.Hold()
	}
}

// goesOn undoes what both did. In a container that has ended, runc refuses those it lets in.
func (c *container) goesOn(ctx context.Context) {
	c.exclusive.GoesOn()
	c.execs.LetIn()
	if told := c.told; told != nil {
		c.told = nil
		if err := told.tellAfter(context.WithoutCancel(ctx)); err != nil {
			log.G(ctx).WithError(err).Warn("hook failed")
		}
	}
	c.hookErr = nil
}

func (p *pausing) pause(ctx context.Context) (uint64, error) {
	_, err := p.s.pause(ctx, p.c, p.read)
	return 0, err
}

// giveBack brings saved GPU state back, or ends the container if the driver will never do so.
func (p *pausing) giveBack(ctx context.Context) error {
	return p.s.endLost(ctx, p.c, p.c.gpu.RestoreInPlace(ctx))
}

func (p *pausing) resume(ctx context.Context) error {
	if p.c.ended {
		return nil
	}
	_, err := p.s.resume(ctx, p.c)
	return err
}

// lock takes the CUDA lock of a running container, if it uses CUDA.
func (c *container) lock(ctx context.Context, read config.Source) error {
	candidates, err := c.candidates()
	if err != nil || len(candidates) == 0 {
		return err
	}
	view, err := read()
	if err != nil {
		return err
	}
	if err := c.gpu.Lock(ctx, candidates, c.gpuOptions(view.Node)); err != nil {
		return err
	}
	if c.gpu.Phase() == gpustate.Locked {
		facts := c.gpu.Facts()
		log.G(ctx).WithFields(log.Fields{"phase": "lock", "took": facts.LockTook, "processes": facts.Processes}).Info("phase")
	}
	return nil
}

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

// resume brings the GPU state back where a checkpoint could not, thaws, unlocks and lets execs in.
func (s *Service) resume(ctx context.Context, c *container) (_ *ptypes.Empty, err error) {
	defer func() {
		if _, gone := proc.StatusOf(c.pid); proc.Ended(gone) {
			c.told = nil // nobody is left to hear
			c.goesOn(ctx)
		} else if err == nil {
			c.goesOn(ctx)
		}
	}()
	if err := s.endLost(ctx, c, c.gpu.RestoreInPlace(ctx)); errors.Is(err, gpustate.ErrLost) {
		return nil, err
	} else if err != nil {
		return nil, fmt.Errorf("give the GPU state back (the container stays paused; resume it again to retry): %w", err)
	}
	c.removeSpill(ctx) // of a suspension whose way back failed
	resp := &ptypes.Empty{}
	// After an unlock that failed the container is thawed already.
	if c.paused || c.gpu.Phase() == gpustate.Unlocked {
		var err error
		within, cancel := context.WithTimeout(ctx, fault.Bound(runcWithin))
		defer cancel()
		if resp, err = s.TTRPCTaskService.Resume(within, &taskAPI.ResumeRequest{ID: c.id}); err != nil {
			err = errgrpc.ToNative(err)
			if cg, cerr := host.CgroupOf(c.pid); cerr == nil {
				if killed := cg.ThawIfKilled(c.pid); killed != nil {
					err = sequence.Join(err, killed)
				} else if c.paused { // a runc that was killed may have thawed it, and the next one must find it paused
					err = sequence.Join(err, cg.Freeze(), cg.ThawIfKilled(c.pid))
				}
			}
			if within.Err() != nil {
				err = fmt.Errorf("runc hangs, and was killed: %w", err)
			}
			if _, gone := proc.StatusOf(c.pid); !c.paused || proc.Ended(gone) { // it is runc's to say why
				return nil, err
			}
			return nil, fmt.Errorf("let it run (the container stays paused; resume it again to retry): %w", err)
		}
		c.paused = false
		c.frozen.Store(nil)
	}
	if err := c.unlock(ctx); err != nil {
		return nil, fmt.Errorf("the container runs, but its CUDA calls are still blocked (resume it again to retry): %w", err)
	}
	return resp, nil
}

// thawEnded thaws the cgroup of a container that was killed while it was frozen. With version 2 the
// processes end, the cgroup stays frozen, and runc takes the container for a paused one, which it
// does not delete.
func (s *Service) thawEnded(ctx context.Context, c *container) {
	cg := c.frozen.Load()
	if cg == nil {
		return
	}
	state, err := s.TTRPCTaskService.State(ctx, &taskAPI.StateRequest{ID: c.id})
	if err != nil || state.Status != task.Status_STOPPED {
		return
	}
	if err := cg.Thaw(); err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.G(ctx).WithError(err).Warn("thaw a container that was killed")
	}
}

// unlock ends the container's CUDA lock, if it has one.
func (c *container) unlock(ctx context.Context) error {
	c.lockErr = nil
	return c.gpu.Unlock(ctx)
}
