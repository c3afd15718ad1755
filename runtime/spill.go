// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/trace"
)

// spillPrefix begins the names of the directories of spilled GPU state, and
// spillDirName is the file in the bundle that names the container's, for the
// case that the shim dies before it removes it.
const (
	spillPrefix  = "gpuckpt-spill-"
	spillDirName = "gpuckpt-spill-dir"
)

// spilled is GPU state on a disk: for each of gpuState.areas one file, whose
// digests are checked when it is read.
type spilled struct {
	dir     string // this container's own
	ranges  []trace.FileRange
	digests [][]string
}

// checkSpillDir refuses a directory that frees no memory.
func checkSpillDir(dir string) error {
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

// spill writes the saved GPU state to a directory of its own in dir and frees
// the memory. On an error the state is in memory still, and nothing in dir.
func (c *container) spill(ctx context.Context, dir string, sizes []uint64) (err error) {
	g := c.gpu
	if err := g.checkInFiles(sizes); err != nil {
		return err
	}
	to := filepath.Join(dir, spillPrefix+c.namespace+"-"+c.id)
	if err := os.Mkdir(to, 0o700); err != nil {
		return fmt.Errorf("make a directory for the GPU state: %w", err)
	}
	s := &spilled{dir: to}
	defer func() {
		if err != nil {
			g.spilled = s
			c.removeSpill(ctx)
		}
	}()
	if err := os.WriteFile(filepath.Join(c.bundle, spillDirName), []byte(to), 0o600); err != nil {
		return fmt.Errorf("remember the spill directory: %w", err)
	}
	tracer, err := g.startedTracer(ctx)
	if err != nil {
		return err
	}
	var files []trace.FileRange
	for i := range g.areas {
		a := &g.areas[i]
		path := filepath.Join(to, a.name)
		files = append(files, trace.FileRange{Path: a.path(), Offset: a.Offset, Bytes: a.Bytes, To: path})
		s.ranges = append(s.ranges, trace.FileRange{Path: path, Offset: a.Offset, Bytes: a.Bytes})
	}
	if len(files) > 0 {
		if s.digests, err = tracer.Copy(files); err != nil {
			return err
		}
	}
	g.spilled = s
	g.freeAreas()
	return nil
}

// checkInFiles refuses a spill when some state was left to the driver, in
// memory of its process: there it would stay.
func (g *gpuState) checkInFiles(sizes []uint64) error {
	for i, p := range g.procs {
		if p.State == cuda.Checkpointed || sizes[i] == 0 {
			continue
		}
		in := false
		for _, a := range g.areas {
			in = in || a.proc == i
		}
		if !in {
			return fmt.Errorf("the GPU state of process %s is in the process's own memory, because it could not be steered into a file (the shim's log says why): suspend the container without a spill: %w",
				commandOf(p.PID), errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// freeAreas gives up the memory that holds the areas, which a spill has too.
// The tracer has it open as well.
func (g *gpuState) freeAreas() {
	for i := range g.areas {
		if g.areas[i].file != nil {
			g.areas[i].file.Close()
			g.areas[i].file = nil
		}
		g.areas[i].Path = ""
	}
	g.closeTracer()
}

// loadSpill reads spilled state into memory and checks it, and gives its bytes.
// It does nothing when nothing is spilled. On an error no memory is taken.
func (g *gpuState) loadSpill(ctx context.Context) (_ uint64, err error) {
	if g.spilled == nil || len(g.areas) == 0 {
		return 0, nil
	}
	defer func() {
		if err != nil {
			g.freeAreas()
		}
	}()
	tracer, err := g.startedTracer(ctx)
	if err != nil {
		return 0, err
	}
	paths, digests, err := tracer.Load(g.spilled.ranges)
	if err != nil {
		return 0, err
	}
	r := restoredAreas{ranges: g.spilled.ranges, want: g.spilled.digests}
	if err := r.compare(digests); err != nil {
		return 0, err
	}
	for i := range g.areas {
		a := &g.areas[i]
		if a.file, err = os.OpenFile(paths[i], os.O_RDWR, 0); err != nil {
			return 0, fmt.Errorf("keep the GPU state that was read: %w", err)
		}
	}
	return r.bytes(), nil
}

// unloadSpill frees the memory that loadSpill filled, also where it is mapped
// already. The container is frozen before and after.
func (g *gpuState) unloadSpill(ctx context.Context, c *container) error {
	if g.spilled == nil || len(g.areas) == 0 {
		return nil
	}
	err := g.thawed(ctx, c, func() {}, func() error {
		helper, err := g.wake(ctx)
		if err != nil {
			return err
		}
		var empty []trace.Mapping
		for _, p := range g.living() {
			// One that was restored by hand may have put the area to other use.
			if state, err := helper.State(ctx, p.PID); err != nil || state != cuda.Checkpointed {
				continue
			}
			for _, a := range g.areas {
				if a.PID == p.PID {
					empty = append(empty, trace.Mapping{PID: p.PID, TID: p.RestoreThread, Start: a.Start, Bytes: a.Bytes, Offset: a.Offset})
				}
			}
		}
		if len(empty) == 0 {
			return nil
		}
		return g.tracer.Map(empty)
	})
	g.freeAreas()
	return err
}

// removeSpill removes what a spill has left on the disk.
func (c *container) removeSpill(ctx context.Context) {
	if c.gpu == nil || c.gpu.spilled == nil {
		return
	}
	if err := os.RemoveAll(c.gpu.spilled.dir); err != nil {
		log.G(ctx).WithError(err).WithField("id", c.id).Warn("remove the spilled GPU state")
		return
	}
	c.gpu.spilled = nil
	if err := os.Remove(filepath.Join(c.bundle, spillDirName)); err != nil && !errors.Is(err, os.ErrNotExist) {
		log.G(ctx).WithError(err).WithField("id", c.id).Warn("forget the spill directory")
	}
}

// removeDeadSpill removes the spilled state of a container whose shim has died.
func removeDeadSpill(bundle string) error {
	dir, err := os.ReadFile(filepath.Join(bundle, spillDirName))
	if err != nil || !strings.HasPrefix(filepath.Base(string(dir)), spillPrefix) {
		return nil
	}
	return os.RemoveAll(string(dir))
}
