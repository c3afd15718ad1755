// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/gpu/steer"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/runtime/internal/cudahelper"
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

// Target is what a State may do to its container, by pids as this process counts them.
type Target interface {
	// Init returns the pid of the container's first process.
	Init() int
	// Cgroup returns the container's cgroup.
	Cgroup() (Cgroup, error)
	// CloseExecs keeps processes from being exec'd into the container until reopen
	// is called. It does not stop those that are on their way in.
	CloseExecs() (reopen func())
	// RefuseStartingExecs returns an error while a process is on its way in.
	RefuseStartingExecs() error
}

// Cgroup is what a State needs of a cgroup; host.Cgroup is one.
type Cgroup interface {
	// Pids returns the pids of all processes in it, ascending.
	Pids() ([]int, error)
	// Freeze stops all processes and returns once they have stopped. On an error some may be.
	Freeze() error
	// Thaw lets all processes run.
	Thaw() error
	// Loosen makes sure that all threads can be seized while the cgroup is frozen.
	Loosen() error
	// ThawIfKilled thaws the cgroup if the container's first process has been
	// killed, since nobody else will, and then returns an error that says so.
	ThawIfKilled(first int) error
}

// Options are what a State needs to know of the node and the container's spec, for one operation.
type Options struct {
	// Config is the node's configuration, as the container's annotations change it.
	Config config.Node
	// Request is what the container's spec grants.
	Request cdi.Request
	// Visible are the UUIDs of the GPUs that the driver brings up in a helper; nil for all.
	Visible []string
}

// State is the GPU state of one container. The package comment says which call is legal when.
type State struct {
	target  Target
	phase   Phase
	opts    Options
	helpers cudahelper.Helpers
	tracers tracers

	// Stuck says that the way back of the last operation has failed, and that the container stays as it was
	// left. What the driver refuses in the next one is lost.
	Stuck bool

	locked            // Unlock and Forget clear it
	onto   []cdi.Pair // of ChooseGPUs; nil for the GPUs that the processes had
}

// New returns the State of a container whose CUDA processes run, if it has any.
// run starts helper and worker processes. It costs nothing.
func New(target Target, run cudahelper.Run) *State {
	return &State{target: target, helpers: cudahelper.Helpers{Run: run}, tracers: tracers{run: run}}
}

// Phase returns where the state is.
func (s *State) Phase() Phase { return s.phase }

// require returns an error if the State is in none of the phases.
func (s *State) require(doing string, phases ...Phase) error {
	if slices.Contains(phases, s.phase) {
		return nil
	}
	return fmt.Errorf("%s: the container's GPU state is %v: %w", doing, s.phase, errdefs.ErrFailedPrecondition)
}

// use makes the State go by the options of an operation.
func (s *State) use(opts Options) {
	s.opts = opts
	s.helpers.Node, s.helpers.Visible = opts.Config, opts.Visible
	s.tracers.node = opts.Config.Staging
}

func pidsOf(target Target) ([]int, error) {
	cgroup, err := target.Cgroup()
	if err != nil {
		return nil, err
	}
	return cgroup.Pids()
}

// Candidates returns the container's processes that could be CUDA processes, by a
// look at /proc that costs a container without CUDA next to nothing.
func (s *State) Candidates() ([]int, error) {
	pids, err := pidsOf(s.target)
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

// Lock finds the CUDA processes among the candidates and locks them all, also those that come up
// meanwhile. The State stays Unlocked if no candidate has files of a GPU; with bystanders alone it
// is Locked, and there is no GPU state. The container must be running. On an error the processes are
// as they were.
func (s *State) Lock(ctx context.Context, candidates []int, opts Options) error {
	if err := s.require("lock CUDA processes", Unlocked); err != nil {
		return err
	}
	began := time.Now()
	s.use(opts)
	s.locked, s.onto = locked{}, nil
	if err := s.locked.lockAll(ctx, &s.helpers, candidates, s.Candidates, time.Duration(opts.Config.LockTimeout)); err != nil || len(s.procs)+len(s.bystanders) == 0 {
		s.Close()
		s.locked = locked{}
		return err
	}
	s.phase, s.took = Locked, time.Since(began)
	s.copyThreads = steer.CopyThreads(opts.Config.Debug.CopyThreads, s.target.Init(), s.procs.Hosts(), 1)
	s.helpers.IdleAfter(cudahelper.Idle)
	return nil
}

// Facts are numbers of a State for the log and for timelines.
type Facts struct {
	Processes int           // that are locked
	LockTook  time.Duration // the last Lock
	AreaBytes uint64        // of the state that is not in the processes
}

// Facts returns what is known since the last Lock.
func (s *State) Facts() Facts {
	return Facts{Processes: len(s.procs), LockTook: s.took, AreaBytes: bytesOf(s.areas)}
}

// Unlock lets the CUDA processes that have not ended go on; the container must not be frozen. On an
// error some of them may go on, and Unlock can be called again.
func (s *State) Unlock(ctx context.Context) error {
	if s.phase == Unlocked {
		return nil
	}
	if err := s.require("unlock CUDA processes", Locked); err != nil {
		return err
	}
	defer s.Close()
	unlock := func() error {
		helper, err := s.helpers.Get(ctx)
		if err != nil {
			return err
		}
		return s.locked.unlock(ctx, helper)
	}
	err := unlock()
	if errors.Is(err, cuda.ErrHelperGone) { // a helper that was killed is noticed by its first call
		err = unlock()
	}
	if err != nil {
		return err
	}
	s.giveUp()
	s.phase, s.locked = Unlocked, locked{}
	return nil
}

// Close ends the helper and the tracer. The state stays, and a later call starts others.
func (s *State) Close() {
	s.tracers.close()
	s.helpers.Close()
}

// Forget gives the state up, for a container that has ended: also its memory.
func (s *State) Forget() {
	s.Close()
	s.dropAreas()
	s.giveUp()
	s.parked.Forget()
	s.phase, s.locked = Unlocked, locked{}
}
