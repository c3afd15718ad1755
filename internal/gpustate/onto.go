// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/helpers"
	"github.com/gpuckpt/gpuckpt/internal/proc"
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
			onto, err = namedGPUs(all, names)
		}
		if err == nil && len(onto) != len(had) {
			err = fmt.Errorf("the container had %d GPUs, %s: name as many, not %d: %w", len(had), listGPUs(had), len(onto), errdefs.ErrInvalidArgument)
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
	if move.Grant = without(onto, seen); move.Grant != nil { // else it keeps what it has
		move.Revoke = without(had, onto)
	}
	return move, nil
}

func uuidsOf(gpus []cuda.GPU) (uuids []string) {
	for _, d := range gpus {
		uuids = append(uuids, d.UUID)
	}
	return uuids
}

// without returns the GPUs that are not among the others.
func without(gpus, others []cuda.GPU) (left []cuda.GPU) {
	out := uuidsOf(others)
	for _, d := range gpus {
		if !slices.Contains(out, d.UUID) {
			left = append(left, d)
		}
	}
	return left
}

// namedGPUs finds GPUs by UUID or by CUDA's index, each once.
func namedGPUs(all []cuda.GPU, names []string) (found []cuda.GPU, err error) {
	for _, name := range names {
		i := slices.IndexFunc(all, func(d cuda.GPU) bool { return d.UUID == name || strconv.Itoa(d.Index) == name })
		if i < 0 {
			return nil, fmt.Errorf("this node has no GPU %s; it has %s: %w", name, listGPUs(all), errdefs.ErrNotFound)
		}
		if slices.Contains(uuidsOf(found), all[i].UUID) {
			return nil, fmt.Errorf("GPU %s is named twice: %w", name, errdefs.ErrInvalidArgument)
		}
		found = append(found, all[i])
	}
	return found, nil
}

// listGPUs names GPUs for a person: "0 (GPU-…), 1 (GPU-…)".
func listGPUs(gpus []cuda.GPU) string {
	var names []string
	for _, d := range gpus {
		names = append(names, fmt.Sprintf("%d (%s)", d.Index, d.UUID))
	}
	return cmp.Or(strings.Join(names, ", "), "none")
}

// pairOnto returns where the state of each GPU goes: from those that the processes had to onto, in
// their order, and from those that they only saw to what is left, since the driver wants a pair for
// each that was seen (docs/gpus.md). It refuses GPUs of another model, or without room.
func (l *locked) pairOnto(ctx context.Context, by *helpers.Helpers, had, onto, seen []cuda.GPU) ([]cdi.Pair, error) {
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
		return surveyed(slices.Concat(onto, without(seen, onto)), survey), nil
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
		need.GPUs = append(need.GPUs, gpuOf(d))
		need.Processes = append(need.Processes, cdi.ProcessUse{GPUs: []string{d.UUID}, Bytes: bytes})
		pairs = append(pairs, d.UUID+"="+onto[i].UUID)
	}
	for _, d := range without(seen, had) {
		need.GPUs = append(need.GPUs, gpuOf(d))
	}
	return need, strings.Join(pairs, ",")
}

// surveyed returns GPUs with what NVML says of their memory; it may say nothing.
func surveyed(gpus []cuda.GPU, survey cuda.Survey) (all []cdi.GPU) {
	for _, d := range gpus {
		gpu := gpuOf(d)
		gpu.Free = 0
		for _, v := range survey.Devices {
			if v.UUID != d.UUID || v.Memory == 0 {
				continue
			}
			var users []string
			for _, u := range v.Users {
				users = append(users, fmt.Sprintf("process %s has %s", proc.Describe(u.PID), size(u.Bytes)))
			}
			gpu.Free, gpu.Users = max(1, v.Free), strings.Join(users, ", ") // 0 is unknown
		}
		all = append(all, gpu)
	}
	return all
}

// restoreOnto restores to the GPUs of ChooseGPUs, by a helper in the container's namespaces.
func (l *locked) restoreOnto(ctx context.Context, by *helpers.Helpers, init int, onto []cdi.Pair) error {
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
			set := cudaPairs(subset)
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
