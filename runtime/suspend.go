// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/internal/config"
)

// The life of a suspension: a container that is locked and frozen has its GPU
// state saved as for a checkpoint (staging.go), into memory of the shim, and
// stays so. With a spill the memory is then written to a disk and freed. Resume
// is the way back that a checkpoint takes; a spill is mapped from the disk. The processes stay frozen meanwhile: nothing of them may run while
// their GPUs are away.
//
// gpuState.suspended is set in between. A shim that dies takes the memory with
// it, and its container too: containerd kills what has no shim.

// suspension is what a Task Update asks for.
type suspension struct {
	suspend bool
	spill   string   // a directory; "" for none
	gpus    []string // to resume on; nil for the same
}

// suspensionOf reads an Update; nil when it is none of ours.
func suspensionOf(r *taskAPI.UpdateTaskRequest) (*suspension, error) {
	var s suspension
	want, asked := r.Annotations[annotations.Suspend]
	spill, spills := r.Annotations[annotations.SuspendSpill]
	gpus, moves := r.Annotations[annotations.ResumeGPUs]
	switch {
	case !asked && !spills && !moves:
		return nil, nil
	case !slices.Contains([]string{"", "{}"}, string(r.Resources.GetValue())):
		return nil, fmt.Errorf("an update with annotation %s changes no resources: send two updates: %w", annotations.Suspend, errdefs.ErrInvalidArgument)
	case want == "true" && !moves:
		s.suspend = true
	case want == "false" && !spills:
	default:
		return nil, fmt.Errorf("annotation %s is %q; it must be \"true\", which %s may go with, or \"false\", which %s may: %w",
			annotations.Suspend, want, annotations.SuspendSpill, annotations.ResumeGPUs, errdefs.ErrInvalidArgument)
	}
	if spills {
		if !filepath.IsAbs(spill) {
			return nil, fmt.Errorf("annotation %s is %q; it must be an absolute path: %w", annotations.SuspendSpill, spill, errdefs.ErrInvalidArgument)
		}
		s.spill = filepath.Clean(spill)
	}
	if moves {
		for gpu := range strings.SplitSeq(gpus, ",") {
			if gpu = strings.TrimSpace(gpu); gpu == "" {
				return nil, fmt.Errorf("annotation %s is %q; it must be a list of GPUs: %w", annotations.ResumeGPUs, gpus, errdefs.ErrInvalidArgument)
			}
			s.gpus = append(s.gpus, gpu)
		}
	}
	return &s, nil
}

// isSuspended says whether the container's GPU state was taken away by a
// suspension. container.mu is held.
func (c *container) isSuspended() bool { return c.gpu != nil && c.gpu.suspended }

// changeSuspension does what an Update's annotations ask for. On an error the
// container is as it was.
func (s *Service) changeSuspension(ctx context.Context, c *container, want *suspension) error {
	// A change that has begun is not given up with the client, which could not
	// know how it ended.
	ctx = context.WithoutCancel(ctx)
	switch {
	case want.suspend && c.isSuspended():
		return fmt.Errorf("the container is suspended already: %w", errdefs.ErrFailedPrecondition)
	case want.suspend:
		return s.suspend(ctx, c, want.spill)
	case c.isSuspended():
		return s.resumeSuspended(ctx, c, want.gpus)
	case c.gpu != nil && !c.paused && want.gpus == nil: // an unlock that failed
		_, err := s.resume(ctx, c)
		return err
	}
	return fmt.Errorf("the container is not suspended: %w", errdefs.ErrFailedPrecondition)
}

// suspend takes a container off its GPUs, step by step. It may run or be paused.
func (s *Service) suspend(ctx context.Context, c *container, spill string) error {
	gpu, err := c.hasGPU()
	if err != nil {
		return err
	}
	if !gpu {
		return fmt.Errorf("no process of the container uses CUDA: to stop it, pause it: %w", errdefs.ErrFailedPrecondition)
	}
	if spill != "" {
		if err := checkSpillDir(spill); err != nil {
			return err
		}
	}
	q := newSequence("suspend", c.id)
	defer func() { q.save(ctx, c.bundle) }()
	var sizes []uint64
	steps := []step{}
	if !c.paused {
		steps = append(steps, step{
			name: "pause", do: func(ctx context.Context) (uint64, error) { return 0, s.pauseHere(ctx, c, config.For(c.annotations)) },
			back: "resume", undo: func(ctx context.Context) error { _, err := s.resume(ctx, c); return err },
		})
	}
	steps = append(steps, step{name: "preflight", do: func(ctx context.Context) (uint64, error) {
		if err := c.checkLocked(q); err != nil {
			return 0, err
		}
		return 0, c.gpu.checkRoom(spill)
	}})
	if spill != "" {
		steps = append(steps, step{
			name: "make spill directory", do: func(context.Context) (uint64, error) { return 0, c.makeSpill(spill) },
			back: "remove spill directory", undo: func(ctx context.Context) error { c.removeSpill(ctx); return nil },
		})
	}
	steps = append(steps, step{
		name: "save GPU state", do: func(ctx context.Context) (bytes uint64, err error) {
			sizes, err = c.gpu.save(ctx, c, c.gpu.spillDir())
			return sum(sizes), err
		},
		back: "give GPU state back", undo: func(ctx context.Context) error { return c.gpu.giveBack(ctx, c) },
	})
	if spill != "" {
		steps = append(steps, step{name: "spill", do: func(ctx context.Context) (uint64, error) { return c.gpu.spill(ctx, sizes) }})
	}
	if err := q.run(ctx, steps...); err != nil {
		return err
	}
	c.gpu.suspended = true
	c.gpu.close()
	log.G(ctx).WithFields(log.Fields{"id": c.id, "bytes": sum(sizes), "spill": spill}).Info("suspended")
	return nil
}

// resumeSuspended gives a suspended container its GPUs back, step by step:
// those named, or the ones that it had. It then runs, also if it was paused when
// it was suspended. On an error it stays suspended, and can be resumed again.
func (s *Service) resumeSuspended(ctx context.Context, c *container, gpus []string) error {
	q := newSequence("resume", c.id)
	defer func() { q.save(ctx, c.bundle) }()
	g := c.gpu
	defer func() {
		if c.isSuspended() {
			g.pairs = nil
			g.close()
		}
	}()
	err := q.run(ctx,
		step{name: "choose GPUs", do: func(ctx context.Context) (uint64, error) {
			return 0, c.chooseGPUs(ctx, gpus)
		}},
		step{name: "check spill", do: func(ctx context.Context) (uint64, error) { return g.checkSpill(ctx) }},
		step{
			name: "give access", do: func(context.Context) (uint64, error) { return 0, c.lendGPUs(g.lend) },
			back: "take access away", undo: func(context.Context) error { return c.takeGPUs(g.lend, g.hadGPUs()) },
		},
		step{name: "give GPU state back", do: func(ctx context.Context) (uint64, error) {
			bytes := g.areaBytes()
			if err := g.giveBack(ctx, c); err != nil {
				return 0, fmt.Errorf("the container stays suspended (resume it again to retry): %w", err)
			}
			g.suspended = false
			return bytes, nil
		}},
	)
	if err != nil {
		return err
	}
	c.removeSpill(ctx)
	if err := c.takeGPUs(g.take, g.lend); err != nil {
		log.G(ctx).WithError(err).WithField("id", c.id).Warn("the container still has access to GPUs that it left")
	}
	c.regrant(g.lend, g.take)
	return q.time(ctx, "thaw and unlock", func(ctx context.Context) (uint64, error) {
		_, err := s.resume(ctx, c)
		return 0, err
	})
}

// restoreAll has the driver give the GPU state back: to the GPUs it came from,
// or to those of pairs. The latter only a helper inside the container's
// namespaces can ask for.
func (g *gpuState) restoreAll(ctx context.Context, c *container, helper *cuda.Helper) error {
	if g.pairs == nil {
		return g.procs.Living().Restore(ctx, helper, nil)
	}
	inside, err := startHelper(ctx, g.config, cuda.Options{Join: c.pid})
	if err != nil {
		return err
	}
	defer inside.Close()
	procs := g.procs.Living()
	moved, err := procs.RestoreRemapped(ctx, inside, g.gpuTries())
	if err != nil && len(moved) > 0 {
		return fmt.Errorf("%d of %d processes belong to the new GPUs now, so resume the container on these again: %w", len(moved), len(procs), err)
	}
	return err
}
