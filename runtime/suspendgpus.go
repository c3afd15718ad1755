// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/cuda"
)

// noteUse notes how much of each GPU's memory the locked processes have, as
// NVML counts it. The helper must count pids as the machine does.
func (g *gpuState) noteUse(ctx context.Context) error {
	helper, err := g.wake(ctx)
	if err != nil {
		return err
	}
	survey, err := helper.Survey(ctx)
	if err != nil {
		return err
	}
	ours := make(map[int]bool)
	for _, p := range g.procs {
		ours[p.PID] = p.State != cuda.Checkpointed
	}
	g.use = make(map[string]uint64)
	for _, d := range survey.Devices {
		for _, u := range d.Users {
			if ours[u.PID] {
				g.use[d.UUID] += u.Bytes
			}
		}
	}
	return nil
}

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
	g.pairs = nil
	had := g.hadGPUs()
	onto := had
	if gpus != nil {
		var err error
		if onto, err = namedGPUs(g.info.GPUs, gpus); err != nil {
			return err
		}
		if err := c.checkOnto(ctx, had, onto); err != nil {
			return err
		}
		same := true
		for i := range had {
			g.pairs = append(g.pairs, cuda.Pair{Old: had[i].UUID, New: onto[i].UUID})
			same = same && had[i].UUID == onto[i].UUID
		}
		if same {
			g.pairs = nil
		}
	}
	return g.checkFree(ctx, had, onto)
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
func (c *container) checkOnto(ctx context.Context, had, onto []cuda.GPU) error {
	if len(onto) != len(had) {
		return fmt.Errorf("the container had %d GPUs, %s: name as many, not %d: %w", len(had), listGPUs(had), len(onto), errdefs.ErrInvalidArgument)
	}
	inside, err := startHelper(ctx, c.gpu.config, c.pid)
	if err != nil {
		return err
	}
	defer inside.Close()
	info, err := inside.Info(ctx)
	if err != nil {
		return fmt.Errorf("look for GPUs in the container: %w", err)
	}
	for i, d := range onto {
		if d.Name != had[i].Name {
			return fmt.Errorf("GPU %s is a %s, and the container had a %s: %w", d.UUID, d.Name, had[i].Name, errdefs.ErrFailedPrecondition)
		}
		if !slices.ContainsFunc(info.GPUs, func(in cuda.GPU) bool { return in.UUID == d.UUID }) {
			return fmt.Errorf("the container has no access to GPU %s; it has access to %s: %w", d.UUID, listGPUs(info.GPUs), errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// checkFree refuses GPUs without room for what the container had on theirs.
func (g *gpuState) checkFree(ctx context.Context, had, onto []cuda.GPU) error {
	helper, err := g.wake(ctx)
	if err != nil {
		return err
	}
	survey, err := helper.Survey(ctx)
	if err != nil {
		log.G(ctx).WithError(err).Warn("whether the GPUs have room is not known")
		return nil
	}
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
				d.Index, d.UUID, mib(s.Free), mib(need), others(s.Users), errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// others names the processes that have a GPU's memory, ", which process 12
// (python) has" and so on.
func others(users []cuda.DeviceUse) string {
	var names []string
	for _, u := range users {
		names = append(names, fmt.Sprintf("process %s has %s", commandOf(u.PID), mib(u.Bytes)))
	}
	if names == nil {
		return ""
	}
	return " (" + strings.Join(names, ", ") + ")"
}

// mib words a size as nvidia-smi does.
func mib(bytes uint64) string { return fmt.Sprintf("%d MiB", bytes>>20) }
