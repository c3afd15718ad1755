// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/config"
	"github.com/gpuckpt/gpuckpt/trace"
)

// The life of a saved area: trace.Session backs the driver's staging area by a
// file, which on a tmpfs, or where memory is short, is the image's file itself
// and else memory; once the
// driver is done the process has an empty area and the file is all there is
// (savedArea). A storing digests the file, or copies it from memory to the
// images' directory (store.go). giveBack maps it over the area again.

// savedArea is the GPU state of one area, taken out of its process.
type savedArea struct {
	trace.Area
	proc int // place in gpuState.procs
	// file keeps the state alive if the tracer dies, or if the directory goes
	// because the client does. nil once it is spilled.
	file *os.File
	name string // of the file among the images
	// mapped says that the process has it again, see mapBack.
	mapped bool
}

// path names the area's file, whether or not the tracer that made it lives.
func (a *savedArea) path() string {
	if a.file == nil {
		return a.Path
	}
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), a.file.Fd())
}

// startTracer starts a tracer in the cgroup that staging memory is charged to.
func startTracer(ctx context.Context, node config.Node) (*trace.Session, error) {
	if node.Staging.Cgroup == "" {
		return trace.Start(reap, nil)
	}
	start, err := makeCgroup(node.Staging)
	if err == nil {
		var s *trace.Session
		if s, err = start(); err == nil {
			return s, nil
		}
	}
	if node.Staging.MemoryLimit > 0 { // asked for a bound: none is no answer
		return nil, fmt.Errorf("limit staging memory: %w", err)
	}
	log.G(ctx).WithError(err).Warn("staging memory is charged to containerd's cgroup")
	return trace.Start(reap, nil)
}

// makeCgroup makes the configured cgroup, if need be, and sets its limit. It
// gives what starts a tracer in it.
func makeCgroup(staging config.Staging) (start func() (*trace.Session, error), err error) {
	name := "/" + staging.Cgroup
	if cgroups.Mode() == cgroups.Unified {
		const root = "/sys/fs/cgroup"
		resources := &cgroup2.Resources{Memory: &cgroup2.Memory{}}
		if staging.MemoryLimit > 0 {
			resources.Memory.Max = &staging.MemoryLimit
		}
		cg, err := cgroup2.NewManager(root, name, resources)
		if err != nil {
			return nil, fmt.Errorf("make cgroup %s: %w", name, err)
		}
		return func() (*trace.Session, error) {
			dir, err := os.Open(filepath.Join(root, name))
			if err != nil {
				return nil, err
			}
			defer dir.Close()
			if s, err := trace.Start(reap, dir); err == nil {
				return s, nil
			}
			// A filter of system calls may know no clone3.
			return startMoved(cg.AddProc)
		}, nil
	}
	resources := &specs.LinuxResources{Memory: &specs.LinuxMemory{}}
	if staging.MemoryLimit > 0 {
		resources.Memory.Limit = &staging.MemoryLimit
	}
	memory := func() ([]cgroup1.Subsystem, error) {
		all, err := cgroup1.Default()
		return slices.DeleteFunc(all, func(s cgroup1.Subsystem) bool { return s.Name() != cgroup1.Memory }), err
	}
	cg, err := cgroup1.New(cgroup1.StaticPath(name), resources, cgroup1.WithHierarchy(memory))
	if err != nil {
		return nil, fmt.Errorf("make cgroup %s: %w", name, err)
	}
	return func() (*trace.Session, error) {
		return startMoved(func(pid uint64) error { return cg.AddProc(pid) })
	}, nil
}

// startMoved starts a tracer that move then puts into a cgroup.
func startMoved(move func(pid uint64) error) (*trace.Session, error) {
	s, err := trace.Start(reap, nil)
	if err != nil {
		return nil, err
	}
	if err := move(uint64(s.Pid())); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// startedTracer gives a tracer that lives.
func (g *gpuState) startedTracer(ctx context.Context) (*trace.Session, error) {
	if g.tracer != nil && g.tracer.Alive() {
		return g.tracer, nil
	}
	g.closeTracer()
	var err error
	g.tracer, err = startTracer(ctx, g.config)
	return g.tracer, err
}

func (g *gpuState) closeTracer() {
	if g.tracer != nil {
		if err := g.tracer.Close(); errors.Is(err, trace.ErrTracerGone) {
			*g.tracerDied = true
		}
		g.tracer = nil
	}
}

// steerAll begins to steer every process that is going to be checkpointed.
// Where that cannot be done the driver does as it always does, unless memory is
// short: then that is an error.
func (g *gpuState) steerAll(ctx context.Context, dir string) error {
	if !g.config.Staging.Steer || !trace.CanSteer {
		return nil
	}
	copyTo := ""
	if g.inImages = g.window > 0 || onMemory(dir); !g.inImages {
		dir, copyTo = "", dir
	}
	if g.window > 0 {
		log.G(ctx).WithField("window", g.window).Info("memory is short: GPU state is written through to the disk")
	}
	for _, p := range g.procs {
		if p.State == cuda.Checkpointed {
			continue
		}
		target := trace.Target{PID: p.PID, TID: p.RestoreThread, Dir: dir, Name: images.AreaPrefix(p.NSPID), CopyTo: copyTo, Sweep: *g.tracerDied}
		if g.window > 0 {
			target.Window, target.Reserve = g.window, g.useEach[p.PID]
		} else {
			target.Copiers = g.copiers
		}
		err := g.tracer.Steer(target)
		if err != nil && g.window > 0 {
			return fmt.Errorf("write GPU state through to %s: %w", dir, err)
		}
		if err != nil {
			log.G(ctx).WithError(err).Warn("the staging area is left to the driver")
		}
	}
	return nil
}

// collect takes the steered areas out of their processes. Their files are opened
// here first: a tracer that ends on the way, killed for its memory, say, takes
// nothing with it. On an error those that may have been taken are in areas, and
// giveBack puts them back.
func (g *gpuState) collect(ctx context.Context) (err error) {
	settled, err := g.tracer.Settle()
	if err != nil {
		return joinBack(err, g.tracer.Abandon())
	}
	var areas []savedArea
	count := make(map[int]int)
	for _, a := range settled {
		s := savedArea{Area: a}
		if s.file, err = os.OpenFile(a.Path, os.O_RDWR, 0); err != nil {
			for i := range areas {
				areas[i].drop()
			}
			return joinBack(fmt.Errorf("keep the staging area's file: %w", err), g.tracer.Abandon())
		}
		s.proc = slices.IndexFunc(g.procs, func(p cuda.Process) bool { return p.PID == a.PID })
		pid := g.procs[s.proc].NSPID
		s.name = images.AreaFile(pid, count[pid])
		count[pid]++
		areas = append(areas, s)
	}
	// Which of them the processes still have is not known after an error: those
	// are mapped over by what they are.
	g.areas = areas
	taken, notes, err := g.tracer.Collect()
	for _, n := range notes {
		log.G(ctx).Infof("staging area: %s", n)
	}
	for _, a := range taken {
		i := slices.IndexFunc(g.areas, func(s savedArea) bool { return s.PID == a.PID && s.Start == a.Start })
		g.areas[i].Written = a.Written
	}
	return err
}

// mapBack maps the saved areas' files over their areas again, once: what is there
// afterwards is the driver's, also if it fails for another of the processes. That
// one is then checkpointed again, to wherever the driver likes, and something else
// may lie where its area was. The processes must not be frozen. One that is not checkpointed any more is an error: somebody has
// had the driver restore it by hand, from an area that was empty.
func (g *gpuState) mapBack(ctx context.Context, helper *cuda.Helper) error {
	var mappings []trace.Mapping
	living := g.living()
	for i := range g.areas {
		a := &g.areas[i]
		if a.mapped || !slices.ContainsFunc(living, func(p cuda.Process) bool { return p.PID == a.PID }) {
			continue
		}
		state, err := helper.State(ctx, a.PID)
		if err != nil {
			return err
		}
		if state != cuda.Checkpointed {
			return fmt.Errorf("process %d is %v, though its GPU state is in a file: it was restored by hand from an empty area, and its GPU memory is lost; kill it: %w",
				a.PID, state, errdefs.ErrDataLoss)
		}
		mappings = append(mappings, trace.Mapping{
			PID: a.PID, TID: g.procs[a.proc].RestoreThread,
			Start: a.Start, Bytes: a.Bytes, Path: a.path(), Offset: a.Offset,
		})
	}
	if len(mappings) > 0 {
		if err := g.tracer.Map(mappings); err != nil {
			return err
		}
		if err := quicken(ctx, g.tracer, mappings, g.copiers); err != nil {
			return err
		}
	}
	for i := range g.areas {
		a := &g.areas[i]
		a.mapped = true // the mapping keeps the file
		a.drop()
	}
	return nil
}

// drop gives the shim's own hold of the file up.
func (a *savedArea) drop() {
	if a.file != nil {
		a.file.Close()
		a.file = nil
	}
}

// dropAreas forgets the saved areas, whose content is with the processes or,
// complete, in the image. Memory is freed.
func (g *gpuState) dropAreas() {
	for i := range g.areas {
		g.areas[i].drop()
	}
	g.areas = nil
}

// onMemory says whether a directory is on a file system whose files are memory:
// then a staging area can be backed by the image's own file.
func onMemory(dir string) bool {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return false
	}
	return st.Type == unix.TMPFS_MAGIC || st.Type == unix.HUGETLBFS_MAGIC
}
