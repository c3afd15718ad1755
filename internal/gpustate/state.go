// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"cmp"
	"context"
	"fmt"
	"os/exec"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/config"
	"github.com/gpuckpt/gpuckpt/internal/steer"
)

// Phase is where the GPU state of a container is; the package comment has the order.
type Phase int

// The phases of a State.
const (
	Unlocked Phase = iota
	Locked
	Saved
	Spilled
	Prepared
	Loaded
)

func (p Phase) String() string {
	return [...]string{"unlocked", "locked", "saved", "spilled", "prepared", "loaded"}[p]
}

// Options are what a State needs to know of the node and of the container's spec.
// They are read anew for each operation.
type Options struct {
	// Config is the node's configuration, with what the container's annotations
	// change of it.
	Config config.Node
	// Request is what the container's spec grants.
	Request cdi.Request
	// Visible are the UUIDs of the GPUs that the driver brings up in a helper;
	// nil for all, see Visible.
	Visible []string
}

// Run starts a command and returns what waits for it, as cuda.Options.Run: a
// program that reaps all its children passes its reaper.
type Run = func(*exec.Cmd) (wait func() (int, error), err error)

// State is the GPU state of one container. The package comment says which call is
// legal when.
type State struct {
	target Target
	run    Run

	phase   Phase
	opts    Options
	helpers helpers
	tracer  *steer.Session // nil while nothing is traced or saved
	sweep   bool           // a tracer died: something of it may be open in the processes

	locked            // of the lock; Unlock and Forget clear it
	onto   []cdi.Pair // GPUs to restore on; nil for those that the processes had
}

// locked is what a State knows from its lock on.
type locked struct {
	info        cuda.Info
	procs       cuda.Group // by their pids in the container; State is the state that each was found in
	bystanders  []bystander
	took        time.Duration
	use         usage
	copyThreads int

	path  DataPath // of CheckSpace
	sizes []uint64 // bytes of GPU state by place in procs; nil before Save
	areas []Area   // state that is not in the processes
}

// New returns the State of a container whose CUDA processes run, if it has any.
// run starts helper and worker processes. It costs nothing.
func New(target Target, run Run) *State { return &State{target: target, run: run} }

// Phase returns where the state is.
func (s *State) Phase() Phase { return s.phase }

// require returns an error if the State is in none of the phases.
func (s *State) require(doing string, phases ...Phase) error {
	if slices.Contains(phases, s.phase) {
		return nil
	}
	return fmt.Errorf("%s: the container's GPU state is %v: %w", doing, s.phase, errdefs.ErrFailedPrecondition)
}

func (s *State) pids() ([]int, error) {
	cgroup, err := s.target.Cgroup()
	if err != nil {
		return nil, err
	}
	return cgroup.Pids()
}

// Candidates returns the container's processes that could be CUDA processes, by a
// look at /proc that costs a container without CUDA next to nothing.
func (s *State) Candidates() ([]int, error) {
	pids, err := s.pids()
	if err != nil {
		return nil, err
	}
	var may []int
	for _, pid := range pids {
		ok, err := cuda.MayUseCUDA(pid)
		if err != nil {
			return nil, err
		}
		if ok {
			may = append(may, pid)
		}
	}
	return may, nil
}

// Lock finds the CUDA processes among the candidates and locks them all. The
// State stays Unlocked if no candidate uses a GPU; a container with bystanders alone
// is Locked, and has no GPU state. The container must be running. On an error the
// processes are as they were.
func (s *State) Lock(ctx context.Context, candidates []int, opts Options) error {
	if err := s.require("lock CUDA processes", Unlocked); err != nil {
		return err
	}
	began := time.Now()
	s.opts, s.locked, s.onto = opts, locked{}, nil
	if err := s.lock(ctx, candidates); err != nil || len(s.procs)+len(s.bystanders) == 0 {
		s.Close()
		s.locked = locked{}
		return err
	}
	s.phase, s.took = Locked, time.Since(began)
	pids := make([]int, len(s.procs))
	for i, p := range s.procs {
		pids[i] = p.PID.Host
	}
	s.copyThreads = copyThreads(opts.Config.Staging.CopyThreads, s.target.Init(), pids)
	s.helpers.idleAfter(helperIdle)
	return nil
}

func (s *State) lock(ctx context.Context, pids []int) error {
	helper, err := s.find(ctx, pids)
	if err != nil {
		return err
	}
	if s.opts.Visible != nil && !s.listsAll() { // a process got a GPU past the spec
		s.Close()
		s.opts.Visible = nil
		if helper, err = s.find(ctx, pids); err != nil {
			return err
		}
	}
	// The container's order: its own pids, not the host's.
	slices.SortFunc(s.procs, func(a, b cuda.Process) int { return cmp.Compare(a.PID.NS, b.PID.NS) })
	if err := s.noteBystanders(pids); err != nil || len(s.procs) == 0 {
		return err
	}
	surveyed := make(chan error, 1)
	go func() { // which takes as long as the lock
		var err error
		s.use, err = useOf(ctx, helper, s.procs)
		surveyed <- err
	}()
	err = s.procs.Lock(ctx, helper, time.Duration(s.opts.Config.LockTimeout))
	if serr := <-surveyed; serr != nil {
		log.G(ctx).WithError(serr).Warn("how much GPU memory the processes have is not known: whether there is room for it will be seen")
	}
	return err
}

// find starts the helper and asks it for the GPUs and the processes.
func (s *State) find(ctx context.Context, pids []int) (*cuda.Helper, error) {
	helper, err := s.helpers.ensure(func() (helper *cuda.Helper, err error) {
		helper, s.info, err = s.startHost(ctx, s.opts.Visible, (*cuda.Helper).Info)
		return helper, err
	})
	if err != nil {
		return nil, err
	}
	s.procs, err = cuda.Find(ctx, helper, pids)
	return helper, err
}

// listsAll reports whether the helper listed every GPU that the processes have open.
func (s *State) listsAll() bool {
	for _, p := range s.procs {
		for _, minor := range p.GPUs {
			if !slices.ContainsFunc(s.info.GPUs, func(d cuda.GPU) bool { return d.Minor == minor }) {
				return false
			}
		}
	}
	return true
}

// LockTook returns how long the lock took.
func (s *State) LockTook() time.Duration { return s.took }

// Processes returns how many CUDA processes are locked.
func (s *State) Processes() int { return len(s.procs) }

// Unlock lets the CUDA processes go on; the container must not be frozen. A process
// that has ended is not an error. On an error some of them may go on, and Unlock
// can be called again.
func (s *State) Unlock(ctx context.Context) error {
	if s.phase == Unlocked {
		return nil
	}
	if err := s.require("unlock CUDA processes", Locked); err != nil {
		return err
	}
	helper, err := s.helper(ctx)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := s.procs.Living().Unlock(ctx, helper); err != nil {
		return err
	}
	s.phase, s.locked = Unlocked, locked{}
	return nil
}

// Close ends the helper and the tracer. The state stays, and a later call starts
// others.
func (s *State) Close() {
	s.closeTracer()
	s.helpers.close()
}

// Forget gives the state up, for a container that has ended: also its memory.
func (s *State) Forget() {
	s.Close()
	s.dropAreas()
	s.phase, s.locked = Unlocked, locked{}
}

// AreaBytes returns the size of the state that is not in the processes.
func (s *State) AreaBytes() uint64 { return bytesOf(s.areas) }

// dropAreas forgets the areas, whose bytes are with the processes or, complete, in
// an image. Memory is freed.
func (s *State) dropAreas() {
	for i := range s.areas {
		s.areas[i].release()
	}
	s.areas = nil
}
