// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/docker/go-units"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/internal/config"
	"github.com/gpuckpt/gpuckpt/internal/staging"
	"github.com/gpuckpt/gpuckpt/internal/steer"
)

// tracerMemory is what two tracers, and the kernel on their behalf, take in the
// staging cgroup beside GPU state, in bytes.
const tracerMemory = 24 << 20

// checkMemory looks whether there is memory for GPU state of that size. If not it
// is an error, or a window is chosen for writing it through to dir, as the
// setting says. State of unknown size is written through where it can be.
func (g *gpuState) checkMemory(dir string, state uint64) error {
	short, room, err := g.memoryShort(state)
	if err != nil {
		return err
	}
	mode := g.config.Staging.WhenShort
	steers := g.config.Staging.Steer && steer.CanSteer
	possible := dir != "" && steers && !onMemory(dir)
	known := g.use != nil
	switch {
	case known && short == "", mode != config.WriteThrough && !known, !known && !possible:
		return nil
	case mode != config.WriteThrough:
		return fmt.Errorf("%s: free some, or have the state written to the disk while the driver is at work, by when_short = %q in [staging] of %s or the annotation %s: %w",
			short, config.WriteThrough, config.Path, annotations.WhenShort, errdefs.ErrResourceExhausted)
	case dir == "":
		return fmt.Errorf("%s: free some, or suspend with a spill: %w", short, errdefs.ErrResourceExhausted)
	case !steers:
		return fmt.Errorf("%s, and it can be written through to a disk only where it is steered ([staging] steer, x86-64): free some: %w", short, errdefs.ErrResourceExhausted)
	case !possible:
		return fmt.Errorf("%s, and %s is on a tmpfs, which is memory as well: free some, or choose a directory on a disk: %w", short, dir, errdefs.ErrResourceExhausted)
	}
	return g.chooseWindow(room)
}

// memoryShort says in words that memory is too short for state of that size, ""
// if it is not, and how much there is.
func (g *gpuState) memoryShort(state uint64) (short string, room uint64, err error) {
	room, known := memoryAvailable()
	if known && room < state {
		short = fmt.Sprintf("the GPU state goes through host memory, takes %s there, and %s are available", units.BytesSize(float64(state)), units.BytesSize(float64(room)))
	}
	if !known {
		room = 1 << 62
	}
	node := g.config.Staging
	if !node.Steer || !steer.CanSteer || node.WhenShort == config.Driver {
		return short, room, nil
	}
	cgroup := ""
	if node.Cgroup != "" {
		cgroup = "/" + node.Cgroup
		if _, err := makeCgroup(node); err != nil && node.MemoryLimit > 0 {
			return "", 0, fmt.Errorf("limit staging memory: %w", err)
		}
	}
	if limit := staging.Headroom(cgroup); limit < room {
		room = limit
		if limit < state {
			short = fmt.Sprintf("the GPU state takes %s of memory, and the cgroup of [staging] has room for %s (memory_limit, or a limit above it)", units.BytesSize(float64(state)), units.BytesSize(float64(limit)))
		}
	}
	return short, room, nil
}

// chooseWindow shares the buffer, or what of it there is room for, among the
// processes that are going to be checkpointed.
func (g *gpuState) chooseWindow(room uint64) error {
	n := uint64(0)
	for _, p := range g.procs {
		if p.State != cuda.Checkpointed {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	// A quarter stays for what is about the pages: the kernel's own memory.
	room -= min(room, tracerMemory)
	window := min(uint64(g.config.Staging.Buffer), room/4*3) / n
	if window < staging.MinWindow {
		return fmt.Errorf("there is too little memory to write the GPU state through: each of %d processes needs %s, and gets %s: free some, or raise buffer or memory_limit in [staging] of %s: %w",
			n, units.BytesSize(float64(staging.MinWindow)), units.BytesSize(float64(window)), config.Path, errdefs.ErrResourceExhausted)
	}
	g.window = window
	return nil
}
