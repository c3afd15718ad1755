// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/proc"
	"github.com/gpuckpt/gpuckpt/internal/staging"
)

// Spill writes the saved state to a directory on a disk, that of Save, except for
// what is there already, and frees the memory. It returns the bytes. On an error
// the state is still in memory.
func (s *State) Spill(ctx context.Context, dir string) (bytes uint64, err error) {
	if err := s.require("spill GPU state", Saved); err != nil {
		return 0, err
	}
	if err := s.checkInAreas(); err != nil {
		return 0, err
	}
	worker, err := s.tracers.digester(ctx)
	if err != nil {
		return 0, err
	}
	defer worker.Close()
	if len(s.areas) > 0 {
		digests, err := s.path.Store(ctx, worker, s.areas, dir, false)
		if err != nil {
			return 0, err
		}
		for i := range s.areas {
			a := &s.areas[i]
			a.release()
			a.Digests = digests[i]
			a.Area = a.In(filepath.Join(dir, a.File))
		}
	}
	s.phase = Spilled
	s.tracers.close() // it has the memory open as well
	return bytesOf(s.areas), nil
}

// checkInAreas refuses a spill when some state was left to the driver, in memory of
// its process: it would stay there.
func (l *locked) checkInAreas() error {
	for i, p := range l.procs {
		if p.State == cuda.Checkpointed || l.sizes[i] == 0 {
			continue
		}
		if !slices.ContainsFunc(l.areas, func(a Area) bool { return a.Process == i }) {
			return fmt.Errorf("the GPU state of process %s is in the process's own memory, because it could not be steered into a file (the shim's log says why): suspend the container without a spill: %w",
				proc.Describe(p.PID.Host), errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// CheckSpilled reads spilled state and compares its digests, before any of it is
// given back; the driver then finds it in the page cache. It returns the bytes, and
// does nothing if nothing is spilled.
func (s *State) CheckSpilled(ctx context.Context) (uint64, error) {
	if s.phase != Spilled || len(s.areas) == 0 {
		return 0, nil
	}
	worker, err := s.tracers.digester(ctx)
	if err != nil {
		return 0, err
	}
	defer worker.Close()
	return bytesOf(s.areas), checkDigests(worker, s.areas)
}

// checkDigests has a worker compare the digests of all blocks.
func checkDigests(worker *staging.Digester, areas []Area) error {
	var all []images.Area
	for _, a := range areas {
		all = append(all, a.Area)
	}
	if err := worker.Check(all); err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
	}
	return nil
}
