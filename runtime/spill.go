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
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/proc"
	"github.com/gpuckpt/gpuckpt/internal/staging"
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
	dir   string // this container's own
	areas []images.Area
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

// makeSpill makes a directory of the container's own in dir, into which save
// and spill write. It does nothing without dir.
func (c *container) makeSpill(dir string) (err error) {
	if dir == "" {
		return nil
	}
	to := filepath.Join(dir, spillPrefix+c.namespace+"-"+c.id)
	if err := os.Mkdir(to, 0o700); errors.Is(err, os.ErrExist) {
		return fmt.Errorf("%s is there already, from a container of this name whose node or shim has died: remove it: %w", to, errdefs.ErrAlreadyExists)
	} else if err != nil {
		return fmt.Errorf("make a directory for the GPU state: %w", err)
	}
	if err := os.WriteFile(filepath.Join(c.bundle, spillDirName), []byte(to), 0o600); err != nil {
		return joinBack(fmt.Errorf("remember the spill directory: %w", err), os.Remove(to))
	}
	c.gpu.spilled = &spilled{dir: to}
	return nil
}

// spillDir is where a spill is to go; "" for none.
func (g *gpuState) spillDir() string {
	if g.spilled == nil {
		return ""
	}
	return g.spilled.dir
}

// spill writes to the disk what the tracer has not written of the saved GPU
// state while the driver was at work, and frees the memory. It gives the bytes,
// and does nothing without a spill directory. On an error the state is in
// memory still.
func (g *gpuState) spill(ctx context.Context, sizes []uint64) (bytes uint64, err error) {
	if g.spilled == nil {
		return 0, nil
	}
	if err := g.checkInFiles(sizes); err != nil {
		return 0, err
	}
	var files []staging.FileRange
	for i := range g.areas {
		a := &g.areas[i]
		path := filepath.Join(g.spilled.dir, a.name)
		files = append(files, staging.FileRange{Path: a.path(), Offset: a.Offset, Bytes: a.Bytes, To: path, Written: a.Written, Disk: g.window > 0, Punch: g.window > 0})
		bytes += a.Bytes
	}
	if len(files) == 0 {
		return 0, nil
	}
	digester, err := startDigester(ctx, g.config)
	if err != nil {
		return 0, err
	}
	defer digester.Close()
	store := digester.Copy
	if g.window > 0 { // it was written through
		store = digester.Digest
	}
	digests, err := store(files)
	if err != nil {
		return 0, err
	}
	for i := range g.areas {
		a := &g.areas[i]
		a.drop()
		a.Path = files[i].To // what mapBack maps
		saved := images.Area{File: a.name, Start: a.Start, Bytes: a.Bytes, Offset: a.Offset, Digests: digests[i]}
		g.spilled.areas = append(g.spilled.areas, saved.In(a.Path))
	}
	g.closeTracer() // it has the memory open as well
	return bytes, nil
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
				proc.Describe(p.PID.Host), errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// checkSpill reads what was spilled and compares its digests, before any of it
// is given back; the driver then finds it in the page cache. It gives the bytes,
// and does nothing when nothing is spilled.
func (g *gpuState) checkSpill(ctx context.Context) (uint64, error) {
	if g.spilled == nil || len(g.spilled.areas) == 0 {
		return 0, nil
	}
	digester, err := startDigester(ctx, g.config)
	if err != nil {
		return 0, err
	}
	defer digester.Close()
	return bytesOf(g.spilled.areas), checkAreas(digester, g.spilled.areas)
}

// areaBytes is the size of the state that is in files.
func (g *gpuState) areaBytes() (bytes uint64) {
	for _, a := range g.areas {
		bytes += a.Bytes
	}
	return bytes
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
