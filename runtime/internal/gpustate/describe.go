// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
)

// Describe returns the metadata of the locked processes and their GPUs, for a checkpoint that began
// then. Writer.Describe adds sizes and areas.
//
// A process's GPUs are all that it could open, used or not, and also those that
// CUDA_VISIBLE_DEVICES hid from it: the driver wants a place for each (measured, driver 580). A
// process that somebody has checkpointed by hand is left to them.
func (s *State) Describe(began time.Time) (*images.Metadata, error) {
	m := &images.Metadata{
		SchemaVersion: images.SchemaVersion,
		Created:       began.UTC(),
		DriverVersion: s.info.DriverVersion,
		CUDAVersion:   s.info.CUDAVersion,
	}
	if p, minor := s.unlisted(); p != nil {
		return nil, fmt.Errorf("process %d has /dev/nvidia%d open, a GPU that the driver does not list: %w", p.PID.Host, minor, errdefs.ErrFailedPrecondition)
	}
	used := make(map[string]bool)
	for _, p := range s.procs {
		q := images.Process{PID: p.PID.NS, State: p.State.String(), RestoreThread: p.RestoreThread.NS}
		for _, d := range s.info.GPUs {
			granted := p.State != cuda.Checkpointed && d.Minor >= 0 && s.opts.Request.Grants(cdi.GPU{Minor: d.Minor})
			if granted || slices.Contains(p.GPUs, d.Minor) {
				q.GPUs = append(q.GPUs, d.UUID)
				used[d.UUID] = true
			}
		}
		m.Processes = append(m.Processes, q)
	}
	for _, d := range s.info.GPUs {
		if used[d.UUID] {
			m.GPUs = append(m.GPUs, images.GPU{UUID: d.UUID, Name: d.Name, Memory: d.Memory, Index: d.Index})
		}
	}
	return m, nil
}
