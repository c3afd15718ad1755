// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/docker/go-units"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/proc"
)

// hadGPUs are the GPUs that the processes had open when they were locked, in
// CUDA's order.
func (g *gpuState) hadGPUs() (had []cuda.GPU) {
	for _, d := range g.info.GPUs {
		if slices.ContainsFunc(g.procs, func(p cuda.Process) bool { return slices.Contains(p.GPUs, d.Minor) }) {
			had = append(had, d)
		}
	}
	return had
}

// chooseGPUs checks that the GPUs a container is to be resumed on can take it,
// before the driver is asked: a restore that fails for want of memory can spoil
// the process for later ones (NVIDIA/cuda-checkpoint#44). With gpus, UUIDs or
// indices, it sets the pairs.
func (c *container) chooseGPUs(ctx context.Context, gpus []string) error {
	g := c.gpu
	g.pairs, g.lend, g.take = nil, nil, nil
	had := g.hadGPUs()
	onto := had
	if gpus != nil {
		all, err := g.allGPUs(ctx)
		if err != nil {
			return err
		}
		if onto, err = namedGPUs(all, gpus); err != nil {
			return err
		}
		if err := c.checkOnto(had, onto); err != nil {
			return err
		}
		same := func(a, b cuda.GPU) bool { return a.UUID == b.UUID }
		if !slices.EqualFunc(had, onto, same) {
			g.pairs = pairAll(had, onto, g.seenGPUs())
		}
	}
	return g.checkFree(ctx, had, onto)
}

// allGPUs lists the GPUs of the node, also those that the helper so far was not
// to bring up.
func (g *gpuState) allGPUs(ctx context.Context) ([]cuda.GPU, error) {
	if g.visible != nil {
		g.close()
		g.visible = nil
	}
	helper, err := g.wake(ctx)
	if err != nil {
		return nil, err
	}
	info, err := helper.Info(ctx)
	return info.GPUs, err
}

// seenGPUs are the GPUs that the processes could open, used or not.
func (g *gpuState) seenGPUs() (seen []cuda.GPU) {
	had := g.hadGPUs()
	for _, d := range g.info.GPUs {
		if g.request.Grants(cdi.GPU{Minor: d.Minor}) || slices.ContainsFunc(had, func(h cuda.GPU) bool { return h.UUID == d.UUID }) {
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

// regrant notes what the container has access to after a resumption elsewhere.
func (c *container) regrant(lent, taken []cuda.GPU) {
	minors := slices.DeleteFunc(slices.Clone(c.request.Minors), func(n int) bool {
		return slices.ContainsFunc(taken, func(d cuda.GPU) bool { return d.Minor == n })
	})
	for _, d := range lent {
		if !slices.Contains(minors, d.Minor) {
			minors = append(minors, d.Minor)
		}
	}
	slices.Sort(minors)
	c.request.Minors = minors
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
func (c *container) checkOnto(had, onto []cuda.GPU) error {
	if len(onto) != len(had) {
		return fmt.Errorf("the container had %d GPUs, %s: name as many, not %d: %w", len(had), listGPUs(had), len(onto), errdefs.ErrInvalidArgument)
	}
	// A helper in the container's namespaces is not asked: its cgroup keeps it
	// from no GPU, and NVIDIA's library makes the nodes that it misses.
	seen := c.gpu.seenGPUs()
	for i, d := range onto {
		if d.Name != had[i].Name {
			return fmt.Errorf("GPU %s is a %s, and the container had a %s: %w", d.UUID, d.Name, had[i].Name, errdefs.ErrFailedPrecondition)
		}
		if d.VGPU {
			return fmt.Errorf("GPU %s is a vGPU, which NVIDIA's driver cannot restore to: %w", d.UUID, errdefs.ErrFailedPrecondition)
		}
		if !slices.ContainsFunc(seen, func(s cuda.GPU) bool { return s.UUID == d.UUID }) {
			c.gpu.lend = append(c.gpu.lend, d)
		}
	}
	if len(c.gpu.lend) == 0 {
		return nil // it keeps what it has access to
	}
	for _, d := range had {
		if !slices.ContainsFunc(onto, func(o cuda.GPU) bool { return o.UUID == d.UUID }) {
			c.gpu.take = append(c.gpu.take, d)
		}
	}
	return nil
}

// lendGPUs gives the running container access to GPUs. On an error it has none of
// them.
func (c *container) lendGPUs(gpus []cuda.GPU) error {
	for i, d := range gpus {
		if err := c.devices.Grant(c.pid, gpuNode(d)); err != nil {
			return joinBack(fmt.Errorf("give the container GPU %s: %w", d.UUID, err), c.takeGPUs(gpus[:i+1], nil))
		}
	}
	return nil
}

// takeGPUs undoes lendGPUs. A device that one of keep has too stays allowed.
func (c *container) takeGPUs(gpus, keep []cuda.GPU) error {
	var kept []string
	for _, d := range keep {
		kept = append(kept, gpuNode(d))
	}
	var errs []error
	for _, d := range gpus {
		errs = append(errs, c.devices.Revoke(c.pid, gpuNode(d), kept))
	}
	return joinBack(nil, errs...)
}

func gpuNode(d cuda.GPU) string { return fmt.Sprintf("/dev/nvidia%d", d.Minor) }

// gpuTries are the sets of pairs to restore each process with, by its pid in
// the container: all, as the driver was measured to want them; those of the
// GPUs that it had open; those whose memory it had; then the same for a process
// that an earlier try has moved already.
func (g *gpuState) gpuTries() map[int][][]cuda.Pair {
	tries := make(map[int][][]cuda.Pair)
	for _, p := range g.procs {
		var open, used []cuda.Pair
		for _, pair := range g.pairs {
			at := slices.IndexFunc(g.info.GPUs, func(d cuda.GPU) bool { return d.UUID == pair.Old })
			if at >= 0 && slices.Contains(p.GPUs, g.info.GPUs[at].Minor) {
				open = append(open, pair)
				if g.use[pair.Old] > 0 {
					used = append(used, pair)
				}
			}
		}
		var sets [][]cuda.Pair
		for _, set := range [][]cuda.Pair{g.pairs, open, used} {
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
		tries[p.PID.NS] = sets
	}
	return tries
}

// checkFree refuses GPUs without room for what the container had on theirs. It
// waits a little for memory of a process that has just ended.
func (g *gpuState) checkFree(ctx context.Context, had, onto []cuda.GPU) error {
	helper, err := g.wake(ctx)
	if err != nil {
		return err
	}
	for patience := time.Now().Add(memoryPatience); ; time.Sleep(100 * time.Millisecond) {
		survey, err := helper.Survey(ctx)
		if err != nil {
			log.G(ctx).WithError(err).Warn("whether the GPUs have room is not known")
			return nil
		}
		if err := g.fits(survey, had, onto); err == nil || time.Now().After(patience) {
			return err
		}
	}
}

// fits compares what is free with what is needed.
func (g *gpuState) fits(survey cuda.Survey, had, onto []cuda.GPU) error {
	for i, d := range onto {
		at := slices.IndexFunc(survey.Devices, func(s cuda.Device) bool { return s.UUID == d.UUID })
		if at < 0 || survey.Devices[at].Memory == 0 { // not told
			continue
		}
		s := survey.Devices[at]
		need := g.use[had[i].UUID]
		if need == 0 && len(had) == 1 {
			need = g.areaBytes() // NVML does not tell everywhere
		}
		if need > s.Free {
			return fmt.Errorf("GPU %d (%s) has %s of memory free and the container needs %s%s: the container stays suspended; free the memory, or choose another GPU, and resume it again: %w",
				d.Index, d.UUID, units.BytesSize(float64(s.Free)), units.BytesSize(float64(need)), others(s.Users), errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// others names the processes that have a GPU's memory, ", which process 12
// (python) has" and so on.
func others(users []cuda.DeviceUse) string {
	var names []string
	for _, u := range users {
		names = append(names, fmt.Sprintf("process %s has %s", proc.Describe(u.PID), units.BytesSize(float64(u.Bytes))))
	}
	if names == nil {
		return ""
	}
	return " (" + strings.Join(names, ", ") + ")"
}
