// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/gpu/steer"
)

// steered is what the data paths share that replace the driver's staging area by
// a file (package steer). When the driver is done, the file has the only copy. To
// restore, the file is mapped over the area again.
type steered struct{}

// save steers all processes, has them checkpointed, and takes the areas. A
// process that cannot be steered is left to the driver, unless strict.
func (steered) save(ctx context.Context, job *Job, target steer.Target, strict bool, thaw, checkpoint func() error) ([]Area, error) {
	for _, p := range job.Processes {
		if p.State == cuda.Checkpointed {
			continue
		}
		t := target
		t.PID, t.Name, t.Most = p.PID.Host, images.AreaPrefix(p.PID.NS), job.most(p.PID.Host)
		if tid, ok := job.Savers[t.PID]; ok {
			t.TID = tid
			if err := job.Tracer.Steer(t); err != nil {
				return nil, err
			}
			t.First = 1
		}
		t.TID, t.Sweep = p.RestoreThread.Host, job.Sweep
		if t.Window > 0 {
			t.Reserve = job.Use.byPID[t.PID]
		} else {
			t.CopyThreads = job.CopyThreads
		}
		err := job.Tracer.Steer(t)
		if err != nil && strict {
			return nil, fmt.Errorf("write GPU state through to %s: %w", t.Dir, err)
		}
		if err != nil {
			log.G(ctx).WithError(err).Warn("the staging area is left to the driver")
		}
	}
	if err := thaw(); err != nil {
		return nil, err
	}
	if err := checkpoint(); err != nil {
		return nil, err
	}
	return take(ctx, job)
}

// most is the largest host memory, in bytes, that the driver asks for to save a process. The driver's own
// GPU memory counts as used, and it leaves out of that what it can make again. An eighth more is for what
// came up since the survey, and a GiB for a context: a process that had just begun was surveyed with 17 MB
// and saved with 553 MB (H100, driver 580).
func (j *Job) most(pid int) uint64 {
	use := j.Use.byPID[pid]
	if use == 0 { // not known
		for _, g := range j.GPUs {
			use += g.Memory
		}
	}
	if use == 0 {
		return 0
	}
	return use + max(use/8, 1<<30)
}

// take takes the steered areas out of their processes. It opens their files first: a tracer that
// ends meanwhile, killed for its memory, say, takes nothing with it.
func take(ctx context.Context, job *Job) ([]Area, error) {
	settled, err := job.Tracer.Stop()
	if err != nil {
		return nil, err
	}
	var areas []Area
	for _, s := range settled {
		f, err := os.OpenFile(s.Path, os.O_RDWR, 0)
		if err != nil {
			for _, a := range areas {
				a.held.file.Close() // the process needs what is in it
			}
			return nil, fmt.Errorf("keep the staging area's file: %w", err)
		}
		at := slices.IndexFunc(job.Processes, func(p cuda.Process) bool { return p.PID.Host == s.PID })
		a := Area{Process: at, Area: images.Area{File: images.AreaFile(job.Processes[at].PID.NS, s.Number), Start: s.Start, Bytes: s.Bytes, Offset: s.Offset}}
		a.hold(f)
		areas = append(areas, a)
	}
	// After an error it is not known which areas the processes still have. All are
	// returned: each will be mapped over by its own bytes.
	taken, notes, err := job.Tracer.Commit()
	steer.LogNotes(ctx, notes)
	for _, t := range taken {
		i := slices.IndexFunc(areas, func(a Area) bool { return job.Processes[a.Process].PID.Host == t.PID && a.Start == t.Start })
		areas[i].Written = t.Written
	}
	if err != nil && areas == nil {
		areas = []Area{}
	}
	return areas, err
}

// Abort ends the steering.
func (steered) Abort(job *Job) (lent []*Lent, err error) {
	areas, err := job.Tracer.Abort()
	for _, a := range areas {
		if f, ferr := os.OpenFile(a.Path, os.O_RDWR, 0); ferr == nil { // else the tracer has ended
			lent = append(lent, lend(f))
		}
	}
	return lent, err
}

// Restore maps the areas' files over the areas, each by a call in the driver's own thread, and
// starts copy threads. What an area's digests tell to be zero stays the empty area.
func (steered) Restore(ctx context.Context, job *Job, areas []Area) (func(context.Context), error) {
	var mappings []steer.Mapping
	for _, a := range areas {
		p := job.Processes[a.Process]
		if a.Digests != nil { // what is zero is read as huge pages
			mappings = append(mappings, steer.Mapping{PID: p.PID.Host, TID: p.RestoreThread.Host, Start: a.Start, Bytes: a.Bytes})
		}
		for _, e := range a.Extents() {
			mappings = append(mappings, steer.Mapping{
				PID: p.PID.Host, TID: p.RestoreThread.Host, Start: e.Start, Bytes: e.Bytes, Path: e.Path, Offset: e.Offset,
			})
		}
	}
	done := func(ctx context.Context) { steer.EndCopy(ctx, job.Tracer) }
	if len(mappings) == 0 {
		return done, nil
	}
	if err := job.Tracer.Map(mappings); err != nil {
		return nil, err
	}
	return done, steer.HelpCopy(ctx, job.Tracer, mappings, job.CopyThreads)
}

// ranges returns the areas, each as its part of the file that it is in.
func ranges(areas []Area) []staging.FileRange {
	var files []staging.FileRange
	for _, a := range areas {
		files = append(files, staging.FileRange{Path: a.Location[0].Path, Offset: a.Offset, Bytes: a.Bytes})
	}
	return files
}

// memoryFirst has the driver fill memory without a name, which goes to a disk later: partly behind
// the driver, while it fills, and the rest in Store. Without a directory the state stays in memory.
type memoryFirst struct{ steered }

func (p memoryFirst) Save(ctx context.Context, job *Job, dir string, thaw, checkpoint func() error) ([]Area, error) {
	return p.save(ctx, job, steer.Target{CopyTo: dir}, false, thaw, checkpoint)
}

func (memoryFirst) Store(_ context.Context, worker *staging.Digester, areas []Area, dir string, _ bool) ([][]string, error) {
	files := ranges(areas)
	for i, a := range areas {
		files[i].To, files[i].Written, files[i].Computed = filepath.Join(dir, a.File), a.Written, a.Computed
	}
	return worker.Copy(files)
}

// imageFile has the driver fill the image's own file on a tmpfs, which is memory already.
type imageFile struct{ steered }

func (p imageFile) Save(ctx context.Context, job *Job, dir string, thaw, checkpoint func() error) ([]Area, error) {
	return p.save(ctx, job, steer.Target{Dir: dir}, false, thaw, checkpoint)
}

// Store digests the files where they are. It makes holes of what is zero, unless
// the driver is going to read there: it would fill them, at the container's expense.
func (imageFile) Store(_ context.Context, worker *staging.Digester, areas []Area, _ string, stays bool) ([][]string, error) {
	files := ranges(areas)
	for i, a := range areas {
		files[i].Punch, files[i].Written, files[i].Computed = !stays, a.Written, a.Computed
	}
	return worker.Digest(files)
}

// writeThrough has the driver fill the image's own file on a disk through a small buffer, where
// memory is too short for the whole. A process that cannot be steered is an error.
type writeThrough struct {
	steered
	window uint64 // bytes of each area that may be in memory at a time
}

func (p writeThrough) Save(ctx context.Context, job *Job, dir string, thaw, checkpoint func() error) ([]Area, error) {
	log.G(ctx).WithField("window", p.window).Info("memory is short: GPU state is written through to the disk")
	return p.save(ctx, job, steer.Target{Dir: dir, Window: p.window}, true, thaw, checkpoint)
}

// Store flushes and digests the files where they are, past the page cache. The
// disk has the only copy, also when the driver reads it again.
func (writeThrough) Store(_ context.Context, worker *staging.Digester, areas []Area, _ string, _ bool) ([][]string, error) {
	files := ranges(areas)
	for i := range files {
		files[i].Disk, files[i].Punch = true, true
	}
	return worker.Digest(files)
}
