// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
)

// usage is GPU memory in bytes as NVML counts it; the maps are nil if it is not
// known.
type usage struct {
	byGPU map[string]uint64 // by UUID
	byPID map[int]uint64
}

// total returns the sum over all GPUs.
func (u usage) total() (bytes uint64) {
	for _, n := range u.byGPU {
		bytes += n
	}
	return bytes
}

// useOf asks how much GPU memory the processes have. The helper must count pids as
// the machine does.
func useOf(ctx context.Context, helper *cuda.Helper, procs []cuda.Process) (usage, error) {
	survey, err := helper.Survey(ctx)
	if err != nil {
		return usage{}, err
	}
	ours := make(map[int]bool)
	for _, p := range procs {
		ours[p.PID.Host] = p.State != cuda.Checkpointed
	}
	u := usage{byGPU: make(map[string]uint64), byPID: make(map[int]uint64)}
	for _, d := range survey.Devices {
		for _, user := range d.Users {
			if ours[user.PID] {
				u.byGPU[d.UUID] += user.Bytes
				u.byPID[user.PID] += user.Bytes
			}
		}
	}
	return u, nil
}

// CheckSpace chooses the data path for a Save to dir, and refuses a Save for which
// there is no room: in memory or, if dir is not empty, in the file system of that
// directory. It is an estimate: the driver leaves out what of its own it can make
// again, and others take room meanwhile. If NVML does not report the use, CheckSpace
// does not look for room.
func (s *State) CheckSpace(dir string) (err error) {
	if err := s.require("save GPU state", Locked); err != nil {
		return err
	}
	if dir != "" {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			return fmt.Errorf("look at the room in %s: %w", dir, err)
		}
		// A tmpfs without a size has no blocks.
		state := s.use.total()
		if room := st.Bavail * uint64(st.Bsize); st.Blocks > 0 && room < state {
			return fmt.Errorf("the GPU state takes %s and %s has room for %s: free some, or choose another directory: %w: %w",
				size(state), dir, size(room), unix.ENOSPC, errdefs.ErrResourceExhausted)
		}
	}
	s.path, err = choosePath(s.opts.Config.Staging, dir, s.procs, s.use)
	return err
}

// size words a number of bytes.
func size(bytes uint64) string { return units.BytesSize(float64(bytes)) }
