// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
	"github.com/gpuckpt/gpuckpt/internal/operation/sequence"
	"github.com/gpuckpt/gpuckpt/runtime/internal/gpustate/internal/digestcheck"
)

// Preflight chooses the data path for a Save to dir. It refuses a Save while CUDA processes are not
// locked, one of processes that share GPU memory, and one for which there is no room: in memory or, if dir is not empty,
// in its file system. The room is an estimate: the driver leaves out what of its own it can make again, and others take
// room meanwhile. If NVML does not report the use, Preflight does not look for room. The container is frozen.
func (s *State) Preflight(ctx context.Context, dir string) (err error) {
	if err := s.require("save GPU state", Locked); err != nil {
		return err
	}
	candidates, err := s.Candidates()
	if err != nil {
		return err
	}
	if err := s.refuseUnlocked(candidates); err != nil {
		return err
	}
	for _, p := range s.procs {
		if err := refuseStopped([]int{p.PID.Host}); err != nil { // since the lock
			return err
		}
	}
	path, chosen := choosePath(s.opts.Config.Staging, dir, s.procs, s.locked.use)
	if len(s.procs) > 0 {
		helper, err := s.helpers.Get(ctx)
		if err != nil {
			return err
		}
		if err := s.refuseShared(ctx, helper, path); err != nil {
			return err
		}
	}
	if dir != "" {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			return fmt.Errorf("look at the room in %s: %w", dir, err)
		}
		// A tmpfs without a size has no blocks.
		state := s.locked.use.total()
		if room := st.Bavail * uint64(st.Bsize); st.Blocks > 0 && room < state {
			return fmt.Errorf("the GPU state takes %s and %s has room for %s: free some, or choose another directory: %w: %w",
				size(state), dir, size(room), unix.ENOSPC, errdefs.ErrResourceExhausted)
		}
	}
	var left error
	s.path, left = keep(s.parked, path)
	return errors.Join(chosen, left)
}

// job is what the data path works on now.
func (s *State) job(next Next) *Job {
	return &Job{
		Processes: s.procs, Helpers: &s.helpers, Tracer: s.tracers.session, Next: next, GPUs: s.had(), Use: s.locked.use,
		CopyThreads: s.copyThreads, Sweep: s.tracers.sweep,
	}
}

// Save has the driver move the GPU state of all processes into their memory, and the data path take it from there, and
// returns its bytes. dir is where Store or Spill will write it; "" for none. The container is frozen before and after;
// while it is thawed, every thread but the driver's is held. On an error the state is where it was; if it could not be
// brought back, the State is Saved, and the error an ErrLost where trying again is of no use.
func (s *State) Save(ctx context.Context, dir string, next Next) (bytes uint64, err error) {
	if err := s.require("save GPU state", Locked); err != nil {
		return 0, err
	}
	if len(s.procs) == 0 { // bystanders have nothing to save
		s.phase = Saved
		return 0, nil
	}
	if s.path == nil {
		return 0, errors.New("save GPU state: Preflight has chosen no data path")
	}
	helper, err := s.helpers.Get(ctx)
	if err != nil {
		return 0, err
	}
	defer s.target.CloseExecs()()
	if err := s.target.RefuseStartingExecs(); err != nil {
		return 0, err
	}
	err = s.tracers.held(ctx, s.target, s.procs, func(thaw func() error) error {
		return s.save(ctx, helper, dir, next, thaw)
	})
	err = sequence.Join(err, s.endHolders())
	if err != nil && s.phase == Saved && !errors.Is(err, ErrLost) {
		err = sequence.Join(err, s.RestoreInPlace(context.WithoutCancel(ctx)))
	}
	for _, n := range s.sizes {
		bytes += n
	}
	return bytes, err
}

// endHolders ends what has taken a file from the driver's thread.
func (s *State) endHolders() error {
	files := slices.Clone(s.lent)
	for _, a := range s.areas {
		files = append(files, a.held)
	}
	cgroup, err := s.target.Cgroup()
	if len(files) == 0 || err != nil {
		return err
	}
	pids, err := cgroup.Pids()
	if err != nil {
		return err
	}
	return endHolders(pids, files)
}

// save is Save while the threads are held.
func (s *State) save(ctx context.Context, helper *cuda.Helper, dir string, next Next, thaw func() error) error {
	var before [][]cuda.Range
	var thawed, refused bool
	job := s.job(next)
	areas, err := s.path.Save(ctx, job, dir, func() error {
		err := thaw()
		thawed = err == nil
		return err
	}, func() (err error) {
		if before, err = s.memory(); err != nil {
			return err
		}
		if err := s.procs.Checkpoint(ctx, helper); err != nil {
			refused = true
			return err
		}
		s.phase = Saved
		return nil
	})
	s.areas = areas
	if err != nil && areas == nil && thawed {
		lent, aerr := s.path.Abort(job)
		s.lent, err = append(s.lent, lent...), sequence.Join(err, aerr)
	}
	if refused && s.anySaved(context.WithoutCancel(ctx), &s.helpers) {
		s.phase, err = Saved, judge(err, s.procs, s.Stuck)
	}
	if err != nil {
		return err
	}
	return s.measure(before)
}

// RestoreInPlace has the driver move the GPU state, if any is saved, back to the GPUs: those it
// came from, or those of ChooseGPUs. The container is frozen before and after, as in Save. On an
// error the State stays as it was, and RestoreInPlace can be called again, unless it is an ErrLost.
func (s *State) RestoreInPlace(ctx context.Context) error {
	if s.phase != Saved && s.phase != Spilled {
		return nil
	}
	if len(s.procs) == 0 {
		s.phase = Locked
		return nil
	}
	helper, err := s.helpers.Get(ctx)
	if err != nil {
		return err
	}
	defer s.target.CloseExecs()()
	err = s.tracers.held(ctx, s.target, s.procs, func(thaw func() error) error {
		if err := thaw(); err != nil {
			return err
		}
		done, err := s.putBack(ctx, helper, s.job(Resumes))
		if err != nil {
			return err
		}
		if s.onto == nil {
			err = judge(s.procs.Living().Restore(ctx, helper, nil), s.procs, s.Stuck)
		} else {
			err = s.restoreOnto(ctx, &s.helpers, s.target.Init(), s.onto)
		}
		done(ctx)
		if err == nil {
			s.phase, s.onto = Locked, nil
		}
		return err
	})
	if s.phase == Locked {
		// The tracer has the areas' memory too. A client may leave the container
		// paused for as long as it packs the images.
		s.dropAreas()
		s.tracers.close()
	}
	return err
}

// Spill writes the saved state to a directory on a disk, that of Save, except for what is there
// already, frees the memory, and returns the bytes. On an error the state is still in memory.
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

// checkInAreas refuses a spill when some state was left in memory of its process, to the driver.
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

// CheckSpilled reads spilled state, if any, and compares its digests, before any of it is given
// back; the driver then finds it in the page cache. It returns the bytes.
func (s *State) CheckSpilled(ctx context.Context) (uint64, error) {
	if s.phase != Spilled || len(s.areas) == 0 {
		return 0, nil
	}
	worker, err := s.tracers.digester(ctx)
	if err != nil {
		return 0, err
	}
	defer worker.Close()
	return bytesOf(s.areas), digestcheck.Areas(worker, imageAreas(s.areas))
}

func imageAreas(areas []Area) (all []images.Area) {
	for _, a := range areas {
		all = append(all, a.Area)
	}
	return all
}
