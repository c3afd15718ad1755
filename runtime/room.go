// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"bytes"
	"context"
	"fmt"
	"os"

	"github.com/containerd/errdefs"
	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
)

// useOf asks how much of each GPU's memory the processes have, by UUID, and how
// much each process has, by pid, in bytes and as NVML counts it. The helper must
// count pids as the machine does.
func useOf(ctx context.Context, helper *cuda.Helper, procs []cuda.Process) (use map[string]uint64, each map[int]uint64, err error) {
	survey, err := helper.Survey(ctx)
	if err != nil {
		return nil, nil, err
	}
	ours := make(map[int]bool)
	for _, p := range procs {
		ours[p.PID.Host] = p.State != cuda.Checkpointed
	}
	use, each = make(map[string]uint64), make(map[int]uint64)
	for _, d := range survey.Devices {
		for _, u := range d.Users {
			if ours[u.PID] {
				use[d.UUID] += u.Bytes
				each[u.PID] += u.Bytes
			}
		}
	}
	return use, each, nil
}

// checkRoom refuses to move GPU state to where there is no room for it: memory
// and, if dir is not empty, the file system of that directory. Where memory is
// short it may choose to write the state through to dir. It is an estimate: the
// driver leaves out what of its own it can make again, and others take room
// meanwhile. When NVML does not tell what the processes have, the end will tell.
func (g *gpuState) checkRoom(dir string) error {
	g.window = 0
	var state uint64
	for _, n := range g.use {
		state += n
	}
	if dir != "" {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			return fmt.Errorf("look at the room in %s: %w", dir, err)
		}
		// A tmpfs without a size has no blocks.
		if room := st.Bavail * uint64(st.Bsize); st.Blocks > 0 && room < state {
			return fmt.Errorf("the GPU state takes %s and %s has room for %s: free some, or choose another directory: %w: %w",
				units.BytesSize(float64(state)), dir, units.BytesSize(float64(room)), unix.ENOSPC, errdefs.ErrResourceExhausted)
		}
	}
	return g.checkMemory(dir, state)
}

// memoryAvailable is what the kernel could give to programs, in bytes; see
// proc_meminfo(5), MemAvailable.
func memoryAvailable() (uint64, bool) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, false
	}
	_, data, found := bytes.Cut(data, []byte("MemAvailable:"))
	var kib uint64
	if _, err := fmt.Sscan(string(data), &kib); !found || err != nil {
		return 0, false
	}
	return kib << 10, true
}
