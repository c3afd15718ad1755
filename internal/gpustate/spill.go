// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

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
	worker, err := startDigester(ctx, s.run, s.opts.Config.Staging)
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
	s.closeTracer() // it has the memory open as well
	return bytesOf(s.areas), nil
}

// checkInAreas refuses a spill when some state was left to the driver, in memory of
// its process: it would stay there.
func (s *State) checkInAreas() error {
	for i, p := range s.procs {
		if p.State == cuda.Checkpointed || s.sizes[i] == 0 {
			continue
		}
		in := false
		for _, a := range s.areas {
			in = in || a.Process == i
		}
		if !in {
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
	worker, err := startDigester(ctx, s.run, s.opts.Config.Staging)
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

// SpillDir is a directory that holds the spilled state of one container.
type SpillDir struct {
	Path string
	note string // the file that names it
}

// spillPrefix begins the names of such directories. spillNote is the file in the
// container's bundle that names the container's, for the case that the shim dies
// before it removes it.
const (
	spillPrefix = "gpuckpt-spill-"
	spillNote   = "gpuckpt-spill-dir"
)

// CheckSpillParent refuses a directory to spill to that frees no memory.
func CheckSpillParent(dir string) error {
	if st, err := os.Stat(dir); err != nil {
		return fmt.Errorf("spill: %w: %w", err, errdefs.ErrFailedPrecondition)
	} else if !st.IsDir() {
		return fmt.Errorf("spill: %s is no directory: %w", dir, errdefs.ErrFailedPrecondition)
	}
	if onMemory(dir) {
		return fmt.Errorf("spill: %s is on a tmpfs, which is memory: choose a directory on a disk: %w", dir, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// MakeSpillDir makes a directory in parent for the container of this name, and
// notes it in the bundle.
func MakeSpillDir(parent, name, bundle string) (*SpillDir, error) {
	d := &SpillDir{Path: filepath.Join(parent, spillPrefix+name), note: filepath.Join(bundle, spillNote)}
	if err := os.Mkdir(d.Path, 0o700); errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("%s is there already, from a container of this name whose node or shim has died: remove it: %w", d.Path, errdefs.ErrAlreadyExists)
	} else if err != nil {
		return nil, fmt.Errorf("make a directory for the GPU state: %w", err)
	}
	if err := os.WriteFile(d.note, []byte(d.Path), 0o600); err != nil {
		return nil, joinBack(fmt.Errorf("remember the spill directory: %w", err), os.Remove(d.Path))
	}
	return d, nil
}

// Remove removes the directory and the note. After an error it can be called again.
func (d *SpillDir) Remove() error {
	if err := os.RemoveAll(d.Path); err != nil {
		return fmt.Errorf("remove the spilled GPU state: %w", err)
	}
	if err := os.Remove(d.note); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("forget the spill directory: %w", err)
	}
	return nil
}

// RemoveDeadSpill removes the spilled state of a container whose shim has died.
func RemoveDeadSpill(bundle string) error {
	dir, err := os.ReadFile(filepath.Join(bundle, spillNote))
	if err != nil || !strings.HasPrefix(filepath.Base(string(dir)), spillPrefix) {
		return nil
	}
	return os.RemoveAll(string(dir))
}
