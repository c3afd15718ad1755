// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/gpu/steer"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
	"github.com/gpuckpt/gpuckpt/internal/operation/quota"
	"github.com/gpuckpt/gpuckpt/runtime/internal/gpustate/internal/digestcheck"
	"github.com/gpuckpt/gpuckpt/runtime/internal/gpustate/internal/mover"
)

// Restoration brings the GPU state of a checkpoint into a new container:
//
//  1. Prepare, before anything of the container exists: hold the checkpoint's files, if they lie where they
//     will be read, and begin to compare their digests, since the reading takes memory bandwidth that the
//     driver wants later. Decide where the GPUs go meanwhile.
//  2. Load, before there are processes. It holds the files if Prepare has not, and begins to
//     fill GPU memory that interposers will take.
//  3. CRIU restores the processes, and holds all of their threads.
//  4. Map has the driver's own threads let go, and puts the areas back into the processes.
//  5. Restore has the driver move the state to the GPUs, unlocks, has interposers take their
//     memory, and has the driver's threads held again. The program can then run.
//
// After an error the container must end. Close is always called.
type Restoration struct {
	s    *State
	gate Gate

	pairs   []cdi.Pair // from the GPUs of the checkpoint to those granted here
	granted int        // GPUs granted here, of which there may be more than pairs

	metadata *images.Metadata
	pinned   *staging.Pins
	areas    []Area
	arriving bool               // bytes of the areas are still arriving
	check    *digestcheck.Check // of the digests
	later    []images.Area      // whose digests are compared from Load on, by the GPU if it can
	done     func(context.Context)
	share    *quota.Processors // from Load on, if there are areas
	fill     *mover.Fill       // from Prepare on, if interposers have areas that all go to one GPU
}

// Gate holds the threads of the restored processes until their GPU state is back: a thread of
// the driver's that wakes by a timer reads memory that is not there yet (measured under JAX,
// driver 580). criu.Gate is one.
type Gate interface {
	// Free lets a thread run on, with all signals blocked; Loose lets it run on with the program's,
	// and what it makes is held. Hold stops it again.
	Free(tid int) error
	Loose(tid int) error
	Hold(tid int) error
}

// Prepare refuses a checkpoint that cannot be restored on this node's GPUs, and starts the helper
// that is used in Restore: while nobody has a GPU open, the driver takes 0.25 to 0.5 s longer to
// begin. wanted is the container's annotation cdi.PairsAnnotation. held is the checkpoint, if its files
// lie where Load will find them, or nil. On an error nothing is held and the helper is ended.
func (s *State) Prepare(ctx context.Context, m *images.Metadata, wanted string, held *images.Checkpoint, opts Options) (_ *Restoration, err error) {
	if err := s.require("prepare a restore", Unlocked); err != nil {
		return nil, err
	}
	if m.HasCustomStorage() {
		return nil, fmt.Errorf("the checkpoint has GPU memory by the driver's custom storage, which this gpuckpt does not restore: restore it with gpuckpt of commit cdc1ea6e: %w", errdefs.ErrFailedPrecondition)
	}
	s.use(opts)
	r := &Restoration{s: s}
	defer func() {
		if err != nil {
			r.letGo()
			s.helpers.Close()
		}
	}()
	if held != nil {
		if err := r.hold(ctx, held); err != nil {
			return nil, err
		}
	}
	helper, info, err := s.helpers.Begin(ctx, (*cuda.Helper).InfoEarly)
	if err != nil {
		return nil, err
	}
	if info.DriverVersion != m.DriverVersion {
		return nil, fmt.Errorf("the checkpoint was made with NVIDIA driver %s and this node has %s: restore it where the driver is the same: %w",
			m.DriverVersion, info.DriverVersion, errdefs.ErrFailedPrecondition)
	}
	if err := r.pair(ctx, helper, info, m, wanted); err != nil {
		return nil, err
	}
	r.warmUp(ctx, m)
	s.phase = Prepared
	return r, nil
}

// hold opens the checkpoint's files where they lie now, and begins to compare their digests. The
// container may never be started: what it holds is a descriptor for each directory of the files,
// until Close, and a process, until the digests are compared. On an error it holds nothing.
func (r *Restoration) hold(ctx context.Context, checkpoint *images.Checkpoint) (err error) {
	if r.pinned, err = staging.Pin(checkpoint); err != nil {
		return err
	}
	r.metadata = checkpoint.Metadata
	for i, p := range r.metadata.Processes {
		for _, a := range p.Areas {
			a.Location = r.pinned.At(a.Location)
			r.areas = append(r.areas, Area{Area: a, Process: i})
			r.arriving = r.arriving || a.Location.Arriving()
		}
	}
	r.check = digestcheck.New(ctx, r.s.tracers.digester)
	if err := r.check.Begin(r.digestNow()); err != nil {
		r.letGo()
		return err
	}
	return nil
}

// Load holds the checkpoint's files, unless Prepare has and they are as they were. gate will hold the
// processes' threads.
func (r *Restoration) Load(ctx context.Context, checkpoint *images.Checkpoint, gate Gate, opts Options) error {
	s := r.s
	if err := s.require("load GPU state", Prepared); err != nil {
		return err
	}
	s.use(opts)
	if r.metadata != nil && r.pinned.Changed() { // whatever the digests were
		r.letGo()
	}
	if r.metadata == nil {
		if err := r.hold(ctx, checkpoint); err != nil {
			return err
		}
		if r.fill == nil {
			r.warmUp(ctx, r.metadata)
		}
	}
	if len(r.areas) > 0 {
		var err error
		if r.share, err = quota.TakeProcessors(opts.Config.Staging.Cgroup); err != nil {
			log.G(ctx).WithError(err).Warn("restores at once do not share the processors")
		}
	}
	if err := r.fillAhead(ctx); err != nil {
		return err
	}
	s.path, r.gate = memoryFirst{}, gate // it reads what every data path's Store leaves
	s.phase = Loaded
	return nil
}

// Map finds the processes that CRIU has restored, puts the areas back into them, and returns their
// size. Files on a disk are mapped as well: the digests have read them into the page cache.
func (r *Restoration) Map(ctx context.Context) (bytes uint64, err error) {
	s := r.s
	if err := s.require("map GPU state", Loaded); err != nil {
		return 0, err
	}
	if err := r.find(ctx); err != nil {
		return 0, err
	}
	if len(r.areas) > 0 {
		if _, err := s.tracers.started(ctx); err != nil {
			return 0, err
		}
	}
	if r.arriving { // what does not need the bytes is done
		if err := r.check.WaitBegun(); err != nil {
			return 0, err
		}
	}
	for _, p := range r.driven() {
		if err := r.gate.Free(p.RestoreThread.Host); err != nil {
			return 0, err
		}
	}
	if len(r.areas) == 0 {
		return 0, nil
	}
	r.done, err = s.path.Restore(ctx, s.job(Resumes), r.areas)
	return bytesOf(r.areas), err
}

// driven returns the processes to restore: all but those that were checkpointed by hand.
func (r *Restoration) driven() cuda.Group {
	return slices.DeleteFunc(slices.Clone(r.s.procs), func(p cuda.Process) bool { return p.State == cuda.Checkpointed })
}

// find finds the processes of the metadata in the container.
func (r *Restoration) find(ctx context.Context) error {
	s := r.s
	helper, err := s.helpers.Get(ctx)
	if err != nil {
		return err
	}
	inside, err := proc.Inside(func() ([]int, error) { return pidsOf(s.target) }, s.target.Init())
	if err != nil {
		return err
	}
	var copying []int
	for _, p := range r.metadata.Processes {
		state, err := cuda.ParseState(p.State)
		if err != nil {
			return err
		}
		// The container may share its pids with others, whose processes are not to be taken.
		pid, ok := inside[p.PID]
		if !ok {
			return fmt.Errorf("the restored container has no process %d: %w", p.PID, errdefs.ErrNotFound)
		}
		q := cuda.Process{PID: cuda.PID{Host: pid, NS: p.PID}, State: state}
		if p.RestoreThread > 0 {
			q.RestoreThread.Host, err = proc.ThreadInside(pid, p.RestoreThread)
		} else { // a checkpoint of an early version; the driver knows
			q.RestoreThread.Host, err = helper.RestoreThread(ctx, pid)
		}
		if err != nil {
			return err
		}
		if len(p.Areas) > 0 {
			copying = append(copying, pid)
		}
		s.procs = append(s.procs, q)
	}
	s.copyThreads = steer.CopyThreads(s.opts.Config.Debug.CopyThreads, s.target.Init(), copying, r.share.AtOnce())
	return nil
}

// Restore has the driver move the state of the restored processes to the GPUs, and unlocks them.
// Until then every CUDA call of theirs blocks. The digests are compared meanwhile, and must be
// right before the unlock.
func (r *Restoration) Restore(ctx context.Context) (bytes uint64, err error) {
	s := r.s
	if err := s.require("restore GPU state", Loaded); err != nil {
		return 0, err
	}
	for _, p := range r.metadata.Processes {
		bytes += p.Bytes
	}
	helper, err := s.helpers.Get(ctx)
	if err != nil {
		return 0, err
	}
	free := drivers(r.driven())
	settle := whileLocked(ctx, callers(r.driven()), func(pid, tid int) error { return breatheAtGate(r.gate, pid, tid, free) })
	defer settle()
	err = r.onto(ctx, helper)
	if err == nil && r.done != nil {
		r.done(ctx)
	}
	if cerr := r.check.Wait(); cerr != nil {
		return 0, cerr // it explains whatever the driver may have to say
	}
	if err != nil {
		return 0, err
	}
	if err := s.procs.Unlock(ctx, helper); err != nil {
		return 0, err
	}
	if err := r.openHeld(ctx); err != nil {
		return 0, err
	}
	settle()
	for _, p := range r.driven() {
		if err := r.gate.Hold(p.RestoreThread.Host); err != nil {
			return 0, err
		}
	}
	s.phase, s.locked = Unlocked, locked{}
	return bytes, nil
}

// Close ends what is under way. The State is Unlocked then.
func (r *Restoration) Close() {
	r.share.Give()
	r.letGo()
	r.s.Forget()
}

// letGo gives up what hold holds.
func (r *Restoration) letGo() {
	r.check.Close() // or it would begin with what fill leaves to it
	r.fill.Close()
	r.pinned.Close()
	r.metadata, r.pinned, r.areas, r.fill, r.check, r.later = nil, nil, nil, nil, nil, nil
}
