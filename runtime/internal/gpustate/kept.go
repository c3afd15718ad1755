// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/internal/gpu/interposer"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/gpu/steer"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
	"github.com/gpuckpt/gpuckpt/runtime/internal/cudahelper"
	"github.com/gpuckpt/gpuckpt/runtime/internal/gpustate/internal/gpulist"
	"github.com/gpuckpt/gpuckpt/runtime/internal/gpustate/internal/mover"
)

// parked are programs whose calls of the driver wait at the gates of their interposers; nil for none.
type parked = interposer.Parked

// park has the interposers of processes close their gates, before the driver locks these.
func park(ctx context.Context, node config.Staging, procs cuda.Group, timeout time.Duration) *parked {
	if !node.Steer || !steer.CanSteer {
		return nil
	}
	p, err := interposer.Park(ctx, procs, timeout)
	if err != nil {
		log.G(ctx).WithError(err).Warn("the interposer's GPU memory is left to the driver")
	}
	return p
}

// drivers returns the threads that work while all others of the processes are held: the driver's own, and
// those that an interposer needs.
func drivers(procs cuda.Group) []int {
	tids := interposer.Threads(procs)
	for _, p := range procs {
		tids = append(tids, p.RestoreThread.Host)
	}
	return tids
}

// callers are those of drivers that may wait for a lock: the others copy, or wait for a copy.
func callers(procs cuda.Group) []int {
	tids := interposer.Savers(procs)
	for _, p := range procs {
		tids = append(tids, p.RestoreThread.Host)
	}
	return tids
}

// refuseReach refuses a process that reaches memory of one GPU from another, unless its interposer takes
// that down: which it does not do where it is not parked, nor where path writes its memory through to a disk.
func (l *locked) refuseReach(pid int, driver string, path DataPath) error {
	c, err := interposer.Find(pid)
	if err != nil {
		return err
	}
	defer c.Close()
	_, through := path.(writeThrough)
	var todo string
	switch {
	case c == nil:
		todo = "start the program with the annotation " + annotations.Interposer + ", or let it see one GPU"
	case through:
		todo = "its interposer needs room in memory: checkpoint to a directory in memory, or raise the limit"
	case l.parked == nil:
		todo = "its interposer could not be parked (the shim's log says why), or [staging] steer is off: try again, with it on"
	default:
		return nil
	}
	return fmt.Errorf("process %s reaches memory of one GPU from another (peer access: JAX with several GPUs, NCCL or PyTorch in one process): driver %s would checkpoint it and might never restore it; %s: %w",
		proc.Describe(pid), driver, todo, errdefs.ErrFailedPrecondition)
}

// kept is the data path of programs that are parked. Their interposers' memory leaves before the driver is
// asked, and is the first area of each. It stays on the GPUs, and a mover copies it beside all else. Where
// that cannot be, the interposers copy it to memory that is steered as the driver's is. What the driver has
// goes by another data path, and so do all areas once they are full.
type kept struct {
	DataPath
	parked *parked
}

// keep returns the data path of processes of which some may be parked; path is the driver's. What that
// writes through to a disk it has alone. nil is no path.
func keep(parked *parked, path DataPath) (DataPath, error) {
	if parked == nil || path == nil {
		return path, nil
	}
	_, through := path.(writeThrough)
	return kept{path, parked}, parked.LeaveToDriver(through)
}

func (k kept) Save(ctx context.Context, job *Job, dir string, thaw, checkpoint func() error) ([]Area, error) {
	helper, err := job.Helpers.Get(ctx)
	if err != nil {
		return nil, err
	}
	m := &keeping{job: job}
	defer m.end()
	var keeper *interposer.Keeper // nil: the interposers copy
	if job.Next != Suspended && dir != "" && k.parked.CanKeep() {
		keeper = m.begin(ctx, helper, dir)
	}
	job.Savers = k.parked.Savers()
	var taken uint64
	areas, err := k.DataPath.Save(ctx, job, dir, func() (err error) {
		if err := thaw(); err != nil {
			return err
		}
		taken, err = k.parked.Save(ctx, helper, time.Duration(job.Helpers.Node.LockTimeout), keeper)
		return err
	}, checkpoint)
	if err == nil && k.parked.Kept() == nil && bytesOf(areas) < taken {
		areas = slices.Concat([]Area{}, areas) // not nil: there is no Abort
		err = fmt.Errorf("the tracer that had the interposer's GPU state has ended: resume the container and try again: %w", errdefs.ErrUnavailable)
	}
	if err == nil {
		areas = append(m.taken(k.parked.Kept()), areas...)
	}
	for i, a := range areas {
		areas[i].Interposer = k.parked.Has(job.Processes[a.Process].PID.Host, a.Start)
	}
	return areas, err
}

// Store waits until the mover has filled its areas. The processes do not depend on this one then.
func (k kept) Store(ctx context.Context, worker *staging.Digester, areas []Area, dir string, stays bool) ([][]string, error) {
	areas = slices.Clone(areas)
	for i := range areas {
		a := &areas[i]
		if a.filling == nil {
			continue
		}
		if _, err := a.filling.Wait(ctx); err != nil {
			a.filling.Close()
			return nil, err
		}
		a.filling.InArea()
		a.Computed = images.DigestsOfParts(a.Bytes, a.filling.Parts(a.filling.pid))
	}
	return k.DataPath.Store(ctx, worker, areas, dir, stays)
}

func (k kept) Restore(ctx context.Context, job *Job, areas []Area) (func(context.Context), error) {
	done, err := k.DataPath.Restore(ctx, job, areas)
	return func(ctx context.Context) {
		done(ctx)
		k.parked.Kept().InArea()
	}, err
}

// filling is what a mover copies to an area.
type filling struct {
	*interposer.Kept
	pid int
}

// keeping has a mover copy what is kept to areas.
type keeping struct {
	job   *Job
	dir   string      // of the areas' files if that is memory; "" for memory without a name
	mover *mover.Warm // nil: nothing is kept
	calm  bool        // the mover is to leave the GPUs and the processors to the programs

	mu    sync.Mutex
	areas []Area
}

// begin begins to start a mover, which comes up beside the rest of the Save, and returns what the interposers keep
// their memory by.
func (k *keeping) begin(ctx context.Context, helper *cuda.Helper, dir string) *interposer.Keeper {
	job := k.job
	if staging.OnMemory(dir) { // where imageFile looks for them
		k.dir = dir
	}
	use := job.Use.byGPU
	used := slices.DeleteFunc(gpulist.UUIDs(job.GPUs), func(uuid string) bool { return use != nil && use[uuid] == 0 })
	start := job.Helpers.Mover(used, job.Use.total())
	k.mover = mover.Start(ctx, func(ctx context.Context) (*cuda.Mover, error) {
		m, err := start(ctx)
		k.calm = err == nil && job.Next == Resumes && cudahelper.RoomTwice(ctx, helper, use)
		return m, err
	})
	return &interposer.Keeper{
		Mover: func(ctx context.Context) (interposer.Mover, error) {
			m, err := k.mover.Take(ctx)
			if err != nil {
				return nil, err
			}
			return cudahelper.Pace(m, k.calm), nil
		},
		File: k.file, Undo: k.remove,
	}
}

// end ends a mover that nobody has, and gives up areas that taken has not taken.
func (k *keeping) end() {
	k.mover.Close()
	for i := range k.areas {
		k.areas[i].release()
	}
}

// file makes the file of a process's area. It has its size from the start on: it is mapped before it is full.
func (k *keeping) file(pid int, bytes uint64) (f *os.File, err error) {
	at := slices.IndexFunc(k.job.Processes, func(p cuda.Process) bool { return p.PID.Host == pid })
	a := Area{Process: at, Area: images.Area{File: images.AreaFile(k.job.Processes[at].PID.NS, 0), Bytes: bytes}}
	if k.dir == "" {
		f, err = staging.MemoryFile((bytes + staging.HugePage - 1) &^ (staging.HugePage - 1))
	} else {
		f, err = os.OpenFile(filepath.Join(k.dir, a.File), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	}
	if err != nil {
		return nil, err
	}
	a.hold(f)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.areas = append(k.areas, a)
	return f, f.Truncate(int64(bytes)) //nolint:gosec // no file is as large
}

// remove removes the files: the memory is not kept.
func (k *keeping) remove() {
	for i := range k.areas {
		if k.dir != "" {
			_ = os.Remove(filepath.Join(k.dir, k.areas[i].File))
		}
		k.areas[i].release()
	}
	k.areas = nil
}

// taken returns the areas of what is kept, by process.
func (k *keeping) taken(what *interposer.Kept) []Area {
	areas := k.areas
	k.areas = nil
	for i := range areas {
		pid := k.job.Processes[areas[i].Process].PID.Host
		areas[i].filling = &filling{what, pid}
		areas[i].Start = what.Place(pid)
	}
	slices.SortFunc(areas, func(a, b Area) int { return a.Process - b.Process })
	return areas
}

// The memory of interposers is made and filled while CRIU restores the processes, which then take it: package
// mover. A process for which that cannot be done fills its own memory, from the area that Map has mapped.

// warmUp begins to start what makes the memory of interposers, if all GPU memory goes from one GPU to one GPU.
func (r *Restoration) warmUp(ctx context.Context, m *images.Metadata) {
	if r.granted != 1 || len(r.pairs) != 1 {
		return
	}
	r.fill = mover.WarmUp(ctx, &r.s.helpers, r.pairs[0].New.UUID, m.Areas())
}

// canFillAhead reports whether all GPU memory is of one GPU.
func (r *Restoration) canFillAhead() bool { return len(r.metadata.GPUs) == 1 }

// digestNow returns the areas whose digests are compared from now on. Those of the others are compared from Load on, by
// the GPU if it can.
func (r *Restoration) digestNow() (now []images.Area) {
	for _, a := range r.areas {
		if a.Interposer && r.canFillAhead() {
			r.later = append(r.later, a.Area)
		} else {
			now = append(now, a.Area)
		}
	}
	return now
}

// fillAhead begins to make the memory of interposers, if that is all on one GPU. The GPU digests it then.
func (r *Restoration) fillAhead(ctx context.Context) error {
	if r.fill != nil && r.canFillAhead() {
		helper, err := r.s.helpers.Get(ctx)
		if err != nil {
			return err
		}
		r.fill.Begin(ctx, helper, imageAreas(r.areas), r.share.AtOnce())
	}
	r.check.BeginUnless(r.later, r.fill.Compared)
	return nil
}

// openHeld has the interposers of the processes take the memory that is made for them, or fill their own, and let their
// programs' calls through.
func (r *Restoration) openHeld(ctx context.Context) error {
	return interposer.OpenHeld(ctx, r.driven(), r.gate, func(ctx context.Context, pid int, start, bytes uint64) []cuda.Memory {
		i := slices.IndexFunc(r.areas, func(a Area) bool {
			return r.s.procs[a.Process].PID.Host == pid && a.Start == start && a.Bytes == bytes
		})
		if i < 0 {
			return nil
		}
		return r.fill.Take(ctx, i)
	})
}
