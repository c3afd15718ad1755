// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/proc"
)

// Move is what a container gets and loses that resumes on other GPUs.
type Move struct {
	Had []cuda.GPU // what the processes had open when they were locked
	// Grant are GPUs that the container has no access to and needs for the resume.
	// Revoke are those in whose place they come.
	Grant, Revoke []cuda.GPU
}

// hadGPUs are the GPUs that the processes had open when they were locked, in
// CUDA's order.
func (s *State) hadGPUs() (had []cuda.GPU) {
	for _, d := range s.info.GPUs {
		if slices.ContainsFunc(s.procs, func(p cuda.Process) bool { return slices.Contains(p.GPUs, d.Minor) }) {
			had = append(had, d)
		}
	}
	return had
}

// ChooseGPUs decides on which GPUs RestoreInPlace restores: those named, UUIDs or
// CUDA's indices, one for each that the processes had and in their order; nil for
// the same as before. It checks that they can take the state before the driver is
// asked: a restore that fails for want of memory can spoil the process for later
// ones (NVIDIA/cuda-checkpoint#44). On an error the choice is as it was before any.
func (s *State) ChooseGPUs(ctx context.Context, names []string) (Move, error) {
	s.onto = nil
	if err := s.require("choose GPUs", Saved, Spilled); err != nil {
		return Move{}, err
	}
	move := Move{Had: s.hadGPUs()}
	onto := move.Had
	if names != nil {
		all, err := s.allGPUs(ctx)
		if err != nil {
			return Move{}, err
		}
		if onto, err = namedGPUs(all, names); err != nil {
			return Move{}, err
		}
		if err := s.checkOnto(&move, onto); err != nil {
			return Move{}, err
		}
	}
	if err := s.checkFree(ctx, move.Had, onto); err != nil {
		return Move{}, err
	}
	same := func(a, b cuda.GPU) bool { return a.UUID == b.UUID }
	if !slices.EqualFunc(move.Had, onto, same) {
		s.onto = pairAll(move.Had, onto, s.seenGPUs())
	}
	return move, nil
}

// allGPUs lists the GPUs of the node, also those that the helper so far was not
// to bring up.
func (s *State) allGPUs(ctx context.Context) ([]cuda.GPU, error) {
	if s.opts.Visible != nil {
		s.helpers.close()
		s.opts.Visible = nil
	}
	helper, err := s.helper(ctx)
	if err != nil {
		return nil, err
	}
	info, err := helper.Info(ctx)
	return info.GPUs, err
}

// seenGPUs are the GPUs that the processes could open, used or not.
func (s *State) seenGPUs() (seen []cuda.GPU) {
	had := s.hadGPUs()
	for _, d := range s.info.GPUs {
		if s.opts.Request.Grants(cdi.GPU{Minor: d.Minor}) || slices.ContainsFunc(had, func(h cuda.GPU) bool { return h.UUID == d.UUID }) {
			seen = append(seen, d)
		}
	}
	return seen
}

// pairAll leads from the GPUs that a container had open to others, and from
// those that it only saw to what is left of these: the driver wants a pair for
// each that was seen (docs/gpus.md).
func pairAll(had, onto, seen []cuda.GPU) (pairs []cuda.Pair) {
	without := func(gpus, those []cuda.GPU) []cuda.GPU {
		return slices.DeleteFunc(slices.Clone(gpus), func(d cuda.GPU) bool {
			return slices.ContainsFunc(those, func(t cuda.GPU) bool { return t.UUID == d.UUID })
		})
	}
	for i := range had {
		pairs = append(pairs, cuda.Pair{Old: had[i].UUID, New: onto[i].UUID})
	}
	left := without(seen, onto) // at least as many as are unused
	for i, d := range without(seen, had) {
		pairs = append(pairs, cuda.Pair{Old: d.UUID, New: left[i].UUID})
	}
	return pairs
}

// namedGPUs finds GPUs by UUID or by CUDA's index, each once.
func namedGPUs(all []cuda.GPU, names []string) (found []cuda.GPU, err error) {
	for _, name := range names {
		i := slices.IndexFunc(all, func(d cuda.GPU) bool { return d.UUID == name || strconv.Itoa(d.Index) == name })
		if i < 0 {
			return nil, fmt.Errorf("this node has no GPU %s; it has %s: %w", name, listGPUs(all), errdefs.ErrNotFound)
		}
		if slices.ContainsFunc(found, func(d cuda.GPU) bool { return d.UUID == all[i].UUID }) {
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
	if names == nil {
		return "none"
	}
	return strings.Join(names, ", ")
}

// checkOnto refuses GPUs that cannot take the place of those the container had.
func (s *State) checkOnto(move *Move, onto []cuda.GPU) error {
	had := move.Had
	if len(onto) != len(had) {
		return fmt.Errorf("the container had %d GPUs, %s: name as many, not %d: %w", len(had), listGPUs(had), len(onto), errdefs.ErrInvalidArgument)
	}
	// A helper in the container's namespaces is not asked: its cgroup keeps it
	// from no GPU, and NVIDIA's library makes the nodes that it misses.
	seen := s.seenGPUs()
	for i, d := range onto {
		if d.Name != had[i].Name {
			return fmt.Errorf("GPU %s is a %s, and the container had a %s: %w", d.UUID, d.Name, had[i].Name, errdefs.ErrFailedPrecondition)
		}
		if d.VGPU {
			return fmt.Errorf("GPU %s is a vGPU, which NVIDIA's driver cannot restore to: %w", d.UUID, errdefs.ErrFailedPrecondition)
		}
		if !slices.ContainsFunc(seen, func(o cuda.GPU) bool { return o.UUID == d.UUID }) {
			move.Grant = append(move.Grant, d)
		}
	}
	if len(move.Grant) == 0 {
		return nil // it keeps what it has access to
	}
	for _, d := range had {
		if !slices.ContainsFunc(onto, func(o cuda.GPU) bool { return o.UUID == d.UUID }) {
			move.Revoke = append(move.Revoke, d)
		}
	}
	return nil
}

// driverRestore has the driver give the GPU state back: to the GPUs it came from, or
// to those of ChooseGPUs. For the latter only a helper inside the container's
// namespaces can ask.
func (s *State) driverRestore(ctx context.Context, helper *cuda.Helper) error {
	if s.onto == nil {
		return cuda.RestoreAll(ctx, helper, living(s.procs), nil)
	}
	inside, err := s.startHelper(ctx, cuda.Options{Join: s.target.Init()})
	if err != nil {
		return err
	}
	defer inside.Close()
	procs := insidePIDs(living(s.procs))
	moved, err := cuda.RestoreAllOnto(ctx, inside, procs, s.ontoTries())
	if err != nil && len(moved) > 0 {
		return fmt.Errorf("%d of %d processes belong to the new GPUs now, so resume the container on these again: %w", len(moved), len(procs), err)
	}
	return err
}

// ontoTries are the sets of pairs to restore each process with, by its pid in
// the container: all, as the driver was measured to want them; those of the
// GPUs that it had open; those whose memory it had; then the same for a process
// that an earlier try has moved already.
func (s *State) ontoTries() map[int][][]cuda.Pair {
	tries := make(map[int][][]cuda.Pair)
	for _, p := range s.procs {
		var open, used []cuda.Pair
		for _, pair := range s.onto {
			at := slices.IndexFunc(s.info.GPUs, func(d cuda.GPU) bool { return d.UUID == pair.Old })
			if at >= 0 && slices.Contains(p.GPUs, s.info.GPUs[at].Minor) {
				open = append(open, pair)
				if s.use.byGPU[pair.Old] > 0 {
					used = append(used, pair)
				}
			}
		}
		var sets [][]cuda.Pair
		for _, set := range [][]cuda.Pair{s.onto, open, used} {
			if len(set) > 0 && !slices.ContainsFunc(sets, func(have []cuda.Pair) bool { return slices.Equal(have, set) }) {
				sets = append(sets, set)
			}
		}
		for _, set := range sets {
			stay := slices.Clone(set)
			for i := range stay {
				stay[i].Old = stay[i].New
			}
			sets = append(sets, stay)
		}
		tries[p.NSPID] = sets
	}
	return tries
}

// checkFree refuses GPUs without room for what the container had on theirs. It
// waits a little for memory of a process that has just ended.
func (s *State) checkFree(ctx context.Context, had, onto []cuda.GPU) error {
	helper, err := s.helper(ctx)
	if err != nil {
		return err
	}
	for patience := time.Now().Add(memoryPatience); ; time.Sleep(100 * time.Millisecond) {
		survey, err := helper.Survey(ctx)
		if err != nil {
			log.G(ctx).WithError(err).Warn("whether the GPUs have room is not known")
			return nil
		}
		if err := s.fits(survey, had, onto); err == nil || time.Now().After(patience) {
			return err
		}
	}
}

// fits compares what is free with what is needed.
func (s *State) fits(survey cuda.Survey, had, onto []cuda.GPU) error {
	for i, d := range onto {
		at := slices.IndexFunc(survey.Devices, func(s cuda.Device) bool { return s.UUID == d.UUID })
		if at < 0 || survey.Devices[at].Memory == 0 { // not told
			continue
		}
		device := survey.Devices[at]
		need := s.use.byGPU[had[i].UUID]
		if need == 0 && len(had) == 1 {
			need = bytesOf(s.areas) // NVML does not tell everywhere
		}
		if need > device.Free {
			return fmt.Errorf("GPU %d (%s) has %s of memory free and the container needs %s%s: the container stays suspended; free the memory, or choose another GPU, and resume it again: %w",
				d.Index, d.UUID, mib(device.Free), mib(need), others(device.Users), errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// others names the processes that have a GPU's memory, ", which process 12
// (python) has" and so on.
func others(users []cuda.DeviceUse) string {
	var names []string
	for _, u := range users {
		names = append(names, fmt.Sprintf("process %s has %s", proc.Describe(u.PID), mib(u.Bytes)))
	}
	if names == nil {
		return ""
	}
	return " (" + strings.Join(names, ", ") + ")"
}
