// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/cuda"
)

// Save has the driver move the GPU state of all processes into their memory, and
// the data path take it from there. dir is where Store or Spill will write it; ""
// for none. It returns the bytes of GPU state. The container is frozen before and
// after; while it is thawed, every thread but the driver's is held. On an error
// the state is where it was; if it could not be brought back, the State is Saved.
func (s *State) Save(ctx context.Context, dir string) (bytes uint64, err error) {
	if err := s.require("save GPU state", Locked); err != nil {
		return 0, err
	}
	helper, err := s.helper(ctx)
	if err != nil {
		return 0, err
	}
	defer s.target.CloseExecs()()
	if err := s.target.RefuseStartingExecs(); err != nil {
		return 0, err
	}
	err = s.held(ctx, func(thaw func() error) error { return s.save(ctx, helper, dir, thaw) })
	if err != nil && s.phase == Saved {
		err = joinBack(err, s.RestoreInPlace(context.WithoutCancel(ctx)))
	}
	for _, n := range s.sizes {
		bytes += n
	}
	return bytes, err
}

// save is Save while the threads are held.
func (s *State) save(ctx context.Context, helper *cuda.Helper, dir string, thaw func() error) error {
	var before [][]cuda.Range
	var thawed, refused bool
	areas, err := s.path.Save(ctx, s.job(), dir, func() (err error) {
		if err := thaw(); err != nil {
			return err
		}
		thawed = true
		if before, err = memoryOf(s.procs); err != nil {
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
		err = joinBack(err, s.path.Abort(s.job()))
	}
	if refused && s.anySaved(context.WithoutCancel(ctx)) {
		s.phase = Saved
	}
	if err != nil {
		return err
	}
	after, err := memoryOf(s.procs)
	if err != nil {
		return err
	}
	s.sizes = make([]uint64, len(s.procs))
	for i := range s.procs {
		for _, a := range cuda.NewRanges(before[i], after[i]) {
			s.sizes[i] += a.Bytes()
		}
	}
	return nil
}

// memoryOf returns the anonymous areas of each process.
func memoryOf(procs cuda.Group) ([][]cuda.Range, error) {
	all := make([][]cuda.Range, len(procs))
	for i, p := range procs {
		var err error
		if all[i], err = cuda.AnonymousRanges(p.PID.Host); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// job is what the data path works on now.
func (s *State) job() *Job {
	return &Job{Processes: s.procs, Tracer: s.tracer, Use: s.use.byPID, CopyThreads: s.copyThreads, Sweep: s.sweep}
}

// anySaved reports whether the driver still has one of the processes checkpointed
// after a step that was undone: undoing may have failed. It reports true if it
// cannot find out: RestoreInPlace is tried then, and reports. The container is
// thawed.
func (s *State) anySaved(ctx context.Context) bool {
	helper, err := s.helper(ctx)
	if err != nil {
		return true
	}
	for _, p := range s.procs.Living() {
		if p.State == cuda.Checkpointed {
			continue // by hand, before
		}
		state, err := helper.State(ctx, p.PID.Host)
		if (err != nil || state == cuda.Checkpointed) && !errors.Is(err, cuda.ErrNotCUDA) {
			return true
		}
	}
	return false
}

// RestoreInPlace has the driver move the GPU state back to the GPUs: those it came
// from, or those of ChooseGPUs. The container is frozen before and after, as in
// Save. It does nothing if nothing is saved. On an error the State stays as it was,
// and RestoreInPlace can be called again.
func (s *State) RestoreInPlace(ctx context.Context) error {
	if s.phase != Saved && s.phase != Spilled {
		return nil
	}
	helper, err := s.helper(ctx)
	if err != nil {
		return err
	}
	defer s.target.CloseExecs()()
	err = s.held(ctx, func(thaw func() error) error {
		if err := thaw(); err != nil {
			return err
		}
		done, err := s.putBack(ctx, helper)
		if err != nil {
			return err
		}
		err = s.driverRestore(ctx, helper)
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
		s.closeTracer()
	}
	return err
}

// putBack has the data path put the areas back, once: what is in a process
// afterwards is the driver's, also if it fails for another process. It then
// checkpoints this one again, to wherever it likes, and something else may lie
// where the area was. A process that is not checkpointed any more is an error:
// somebody has had the driver restore it by hand, from an area that was empty.
func (s *State) putBack(ctx context.Context, helper *cuda.Helper) (done func(context.Context), err error) {
	var areas []Area
	alive := s.procs.Living()
	for _, a := range s.areas {
		pid := s.procs[a.Process].PID.Host
		if a.inProcess || !slices.ContainsFunc(alive, func(p cuda.Process) bool { return p.PID.Host == pid }) {
			continue
		}
		state, err := helper.State(ctx, pid)
		if err != nil {
			return nil, err
		}
		if state != cuda.Checkpointed {
			return nil, fmt.Errorf("process %d is %v, though its GPU state is in a file: it was restored by hand from an empty area, and its GPU memory is lost; kill it: %w",
				pid, state, errdefs.ErrDataLoss)
		}
		areas = append(areas, a)
	}
	if done, err = s.path.Restore(ctx, s.job(), areas); err != nil {
		return nil, err
	}
	for i := range s.areas {
		s.areas[i].inProcess = true // the process keeps the file
		s.areas[i].release()
	}
	return done, nil
}

// held runs do while every thread of the container, except the driver's own, is
// held by psteer. do is to call thaw, after which the driver's threads can work.
// The order is: frozen, held, thawed, frozen again, let go; no instruction of the
// application runs between the two freezes.
func (s *State) held(ctx context.Context, do func(thaw func() error) error) error {
	cgroup, err := s.target.Cgroup()
	if err != nil {
		return err
	}
	pids, err := cgroup.Pids()
	if err != nil {
		return err
	}
	var drivers []int
	for _, p := range s.procs {
		drivers = append(drivers, p.RestoreThread.Host)
	}
	tracer, err := s.startedTracer(ctx)
	if err != nil {
		return err
	}
	if err := tracer.Hold(pids, drivers); err != nil {
		return err
	}
	thawed := false
	err = do(func() error {
		if err := cgroup.Thaw(); err != nil {
			return joinBack(err, cgroup.Freeze())
		}
		thawed = true
		return nil
	})
	if !thawed {
		s.closeTracer() // it cannot let go of frozen threads otherwise
		return err
	}
	return joinBack(err, cgroup.Freeze(), tracer.Release(), cgroup.ThawIfKilled(s.target.Init()))
}

// joinBack joins an error with those of the way back, in one line.
func joinBack(err error, back ...error) error {
	for _, b := range back {
		switch {
		case b == nil:
		case err == nil:
			err = b
		default:
			err = fmt.Errorf("%w; on the way back: %w", err, b)
		}
	}
	return err
}
