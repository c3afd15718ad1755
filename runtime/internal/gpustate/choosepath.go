// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/docker/go-units"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/gpu/steer"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// tracerMemory is what two workers, and the kernel on their behalf, take in the
// staging cgroup beside GPU state, in bytes.
const tracerMemory = 24 << 20

// choosePath chooses the way that GPU state takes to dir, "" for memory only. It is an error if
// memory is short and the state may not, or cannot, be written through to dir. State of unknown
// size is written through where it may be.
func choosePath(node config.Staging, dir string, procs []cuda.Process, use usage) (DataPath, error) {
	state, known := use.total(), use.byGPU != nil
	short, room, err := memoryShort(node, state)
	if err != nil {
		return nil, err
	}
	steers := node.Steer && steer.CanSteer
	through := node.WhenShort == config.WriteThrough && (short != "" || !known)
	possible := dir != "" && steers && !staging.OnMemory(dir)
	switch {
	case through && possible:
		window, err := chooseWindow(node, room, procs)
		return writeThrough{window: window}, err
	case known && short != "" && !through:
		return nil, fmt.Errorf("%s: free some, or have the state written to the disk while the driver is at work, by when_short = %q in [staging] of %s: %w",
			short, config.WriteThrough, config.Path, errdefs.ErrResourceExhausted)
	case known && short != "" && dir == "":
		return nil, fmt.Errorf("%s: free some, or suspend with a spill: %w", short, errdefs.ErrResourceExhausted)
	case known && short != "" && !steers:
		return nil, fmt.Errorf("%s, and it can be written through to a disk only where it is steered ([staging] steer, x86-64): free some: %w", short, errdefs.ErrResourceExhausted)
	case known && short != "":
		return nil, fmt.Errorf("%s, and %s is on a tmpfs, which is memory as well: free some, or choose a directory on a disk: %w", short, dir, errdefs.ErrResourceExhausted)
	case !steers:
		return driverAlone{}, nil
	case dir != "" && staging.OnMemory(dir):
		return imageFile{}, nil
	}
	return memoryFirst{}, nil
}

// memoryShort says that memory is too short for such state, "" if not, and how much there is.
func memoryShort(node config.Staging, state uint64) (short string, room uint64, err error) {
	room, known := proc.MemAvailable()
	if known && room < state {
		short = fmt.Sprintf("the GPU state goes through host memory, takes %s there, and %s are available", size(state), size(room))
	}
	if !known {
		room = 1 << 62
	}
	if !node.Steer || !steer.CanSteer || node.WhenShort == config.Driver {
		return short, room, nil
	}
	cgroup := ""
	if node.Cgroup != "" {
		cgroup = "/" + node.Cgroup
		if _, err := host.MakeMemoryCgroup(cgroup, node.MemoryLimit); err != nil && node.MemoryLimit > 0 {
			return "", 0, fmt.Errorf("limit staging memory: %w", err)
		}
	}
	if limit := host.Headroom(cgroup); limit < room {
		room = limit
		if limit < state {
			short = fmt.Sprintf("the GPU state takes %s of memory, and the cgroup of [staging] has room for %s (memory_limit, or a limit above it)", size(state), size(limit))
		}
	}
	return short, room, nil
}

// chooseWindow shares the buffer, as far as there is room for it, among the processes.
func chooseWindow(node config.Staging, room uint64, procs []cuda.Process) (uint64, error) {
	n := uint64(0)
	for _, p := range procs {
		if p.State != cuda.Checkpointed {
			n++
		}
	}
	if n == 0 {
		return staging.MinWindow, nil
	}
	// A quarter stays for what is about the pages: the kernel's own memory.
	room -= min(room, tracerMemory)
	window := min(node.Buffer(), room/4*3) / n
	if window < staging.MinWindow {
		return 0, fmt.Errorf("there is too little memory to write the GPU state through: each of %d processes needs %s, and gets %s: free some, or raise memory_limit in [staging] of %s: %w",
			n, size(staging.MinWindow), size(window), config.Path, errdefs.ErrResourceExhausted)
	}
	return window, nil
}

func size(bytes uint64) string { return units.BytesSize(float64(bytes)) }
