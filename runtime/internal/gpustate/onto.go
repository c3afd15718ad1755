// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/runtime/internal/cudahelper"
	"github.com/gpuckpt/gpuckpt/runtime/internal/gpustate/internal/gpulist"
)

// Move is what a container gets and loses that resumes on other GPUs.
type Move struct {
	Had []cuda.GPU // what the processes had open when they were locked
	// Grant are GPUs that a resume needs access to, Revoke those whose place they take.
	Grant, Revoke []cuda.GPU
}

// ChooseGPUs decides on which GPUs RestoreInPlace restores: those named, UUIDs or CUDA's indices,
// one for each that the processes had and in their order; nil for the same as before. It checks
// that they can take the state before the driver is asked: a restore that fails for want of memory
// can spoil the process for later ones (NVIDIA/cuda-checkpoint#44). On an error nothing is chosen.
func (s *State) ChooseGPUs(ctx context.Context, names []string) (Move, error) {
	s.onto = nil
	if err := s.require("choose GPUs", Saved, Spilled); err != nil {
		return Move{}, err
	}
	had := s.had()
	move, onto := Move{Had: had}, had
	if names != nil {
		all, err := s.helpers.AllGPUs(ctx)
		if err == nil {
			onto, err = gpulist.Named(all, names)
		}
		if err == nil && len(onto) != len(had) {
			err = fmt.Errorf("the container had %d GPUs, %s: name as many, not %d: %w", len(had), gpulist.List(had), len(onto), errdefs.ErrInvalidArgument)
		}
		if err != nil {
			return Move{}, err
		}
	}
	seen := s.seen(s.opts.Request)
	pairs, err := s.pairOnto(ctx, &s.helpers, had, onto, seen)
	if err != nil || cdi.IsIdentity(pairs) {
		return move, err
	}
	s.onto = pairs
	// A helper in the container's namespaces is not asked what the container has: its
	// cgroup keeps it from no GPU, and NVIDIA's library makes the nodes that it misses.
	if move.Grant = gpulist.Without(onto, seen); move.Grant != nil { // else it keeps what it has
		move.Revoke = gpulist.Without(had, onto)
	}
	return move, nil
}

// pairOnto returns where the state of each GPU goes: from those that the processes had to onto, in
// their order, and from those that they only saw to what is left, since the driver wants a pair for
// each that was seen (docs/gpus.md). It refuses GPUs of another model, or without room.
func (l *locked) pairOnto(ctx context.Context, by *cudahelper.Helpers, had, onto, seen []cuda.GPU) ([]cdi.Pair, error) {
	helper, err := by.Get(ctx)
	if err != nil {
		return nil, err
	}
	need, decided := l.requirement(had, onto, seen)
	pairs, err := cdi.PairWhenFree(ctx, need, decided, func(ctx context.Context) ([]cdi.GPU, error) {
		survey, err := helper.Survey(ctx)
		if err != nil {
			log.G(ctx).WithError(err).Warn("whether the GPUs have room is not known")
		}
		return gpulist.Surveyed(slices.Concat(onto, gpulist.Without(seen, onto)), survey), nil
	})
	if errors.Is(err, cdi.ErrPairs) {
		return nil, fmt.Errorf("%w: the container stays suspended; resume it again afterwards: %w", err, errdefs.ErrFailedPrecondition)
	}
	return pairs, err
}

// requirement returns what the state needs of the GPUs that it is to go to, and, in
// the form of cdi.PairsAnnotation, which goes where.
func (l *locked) requirement(had, onto, seen []cuda.GPU) (need cdi.Requirement, decided string) {
	var pairs []string
	for i, d := range had {
		bytes := l.use.byGPU[d.UUID]
		if bytes == 0 && len(had) == 1 {
			bytes = bytesOf(l.areas) // NVML does not tell everywhere
		}
		need.GPUs = append(need.GPUs, gpulist.ForPairing(d))
		need.Processes = append(need.Processes, cdi.ProcessUse{GPUs: []string{d.UUID}, Bytes: bytes})
		pairs = append(pairs, d.UUID+"="+onto[i].UUID)
	}
	for _, d := range gpulist.Without(seen, had) {
		need.GPUs = append(need.GPUs, gpulist.ForPairing(d))
	}
	return need, strings.Join(pairs, ",")
}

// restoreOnto restores to the GPUs of ChooseGPUs, by a helper in the container's namespaces.
func (l *locked) restoreOnto(ctx context.Context, by *cudahelper.Helpers, init int, onto []cdi.Pair) error {
	inside, err := by.Start(ctx, cuda.Options{Join: init})
	if err != nil {
		return err
	}
	defer inside.Close()
	procs := l.procs.Living()
	moved, err := procs.RestoreRemapped(ctx, inside, l.tries(onto))
	if err != nil && len(moved) > 0 {
		return fmt.Errorf("%d of %d processes belong to the new GPUs now, so resume the container on these again: %w", len(moved), len(procs), err)
	}
	return err
}

// tries returns the sets of pairs to restore each process with, by its pid in the container: all,
// as the driver was measured to want them; those of the GPUs that it had open; those whose memory
// it had; then the same for a process that an earlier try has moved already.
func (l *locked) tries(onto []cdi.Pair) map[int][][]cuda.Pair {
	tries := make(map[int][][]cuda.Pair)
	for _, p := range l.procs {
		open, used := []string{}, []string{}
		for _, d := range l.info.GPUs {
			if slices.Contains(p.GPUs, d.Minor) {
				open = append(open, d.UUID)
				if l.use.byGPU[d.UUID] > 0 {
					used = append(used, d.UUID)
				}
			}
		}
		var sets, moved [][]cuda.Pair
		for _, subset := range cdi.Subsets(onto, nil, open, used) {
			set := gpulist.Pairs(subset)
			stay := slices.Clone(set)
			for i := range stay {
				stay[i].Old = stay[i].New
			}
			sets, moved = append(sets, set), append(moved, stay)
		}
		tries[p.PID.NS] = append(sets, moved...)
	}
	return tries
}
