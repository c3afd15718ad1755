// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"os"

	"github.com/gpuckpt/gpuckpt/internal/node/worker"
)

// ErrTracerGone says that the tracer ended early: the threads it held have been let go.
var ErrTracerGone = errors.New("tracer process ended early; the threads it held run on")

// kind is what all tracers have in common. However one ends, the threads it held run on.
var kind = worker.Kind{
	Name: "tracer", Self: "gpuckpt-tracer", MaxMessage: 64 << 20,
	Gone: ErrTracerGone, Hung: ErrTracerGone, Garbled: ErrTracerGone,
}

// Session is a running tracer, by pids and tids as this process counts them. Its calls take turns.
// One that fails with ErrTracerGone has let go of every thread; only Close is left to do.
type Session struct {
	*worker.Worker
	copies bool // StartCopyThreads was called, and StopCopyThreads was not yet
}

// Start starts a tracer, in a cgroup if one is given: see worker.StartSelf.
func Start(run worker.Run, cgroup *os.File) (*Session, error) {
	w, err := worker.StartSelf(kind, run, cgroup)
	if err != nil {
		return nil, err
	}
	return &Session{Worker: w}, nil
}

// Hold seizes every thread of the processes except those named, and returns once each has been
// asked to stop. The processes must be frozen by their cgroup: each thread then stops before its
// next instruction in user space when the cgroup is thawed. Copy threads that a dead tracer has
// left are not held: they only wait for a copy, and end by themselves. On an error nothing is held.
// A thread that another tracer (a debugger, strace, CRIU) has is an error that names it. With version 1
// of cgroups, host.Cgroup.Loosen must come before, or a stopped thread is waited for in vain.
func (s *Session) Hold(processes, except []int) error {
	_, err := s.call("hold threads", order{Op: opHold, Processes: processes, Except: except})
	return err
}

// Release lets go of the threads that Hold holds, which run on unless they are frozen.
func (s *Session) Release() error {
	_, err := s.call("release threads", order{Op: opRelease})
	return err
}

// Breathe has the threads that Hold holds of a process run for two milliseconds at most, and asks them to stop
// again: one of them may have a lock that tid, which is not held, waits for. Threads of the driver's do not
// run. The process must not be frozen.
func (s *Session) Breathe(pid, tid int) error {
	_, err := s.call("let held threads run for a moment", order{Op: opBreathe, Target: Target{PID: pid, TID: tid}})
	return err
}

// Steer traces the target's thread from now on: the staging area that it maps is backed by a file,
// see the package. The process may be frozen.
func (s *Session) Steer(t Target) error {
	_, err := s.call(fmt.Sprintf("steer thread %d of process %d", t.TID, t.PID), order{Op: opSteer, Target: t})
	return err
}

// Stop stops the steered threads, with their areas complete and in place, and returns the areas. A
// caller that opens their files now has what is in them, whatever becomes of the tracer. Commit or
// Abort must follow; after an error, Abort. The processes must not be frozen.
func (s *Session) Stop() ([]Area, error) {
	r, err := s.call("stop steered threads", order{Op: opStop})
	return r.Areas, err
}

// Commit ends all steering. It replaces the steered areas in the processes by empty ones, and
// returns the steered ones, and notes for the log. The processes must not be frozen. On an error
// some areas may be empty, whose content only their files hold: these are returned with the error,
// unless the tracer is gone: see Stop.
func (s *Session) Commit() (areas []Area, notes []string, err error) {
	r, err := s.call("take staging areas", order{Op: opCommit})
	return r.Areas, r.Notes, err
}

// Abort ends all steering and leaves the steered areas in the processes, and returns them. It removes the
// names of their files; the content stays with the processes. On an error there may be areas.
func (s *Session) Abort() ([]Area, error) {
	r, err := s.call("give up staging areas", order{Op: opAbort})
	return r.Areas, err
}

// Map maps files over areas, several processes' at once, by calls in the threads named, which must
// not be frozen nor held. On an error any of them may be done; doing them again does no harm.
func (s *Session) Map(mappings []Mapping) error {
	_, err := s.call("map staging areas", order{Op: opMap, Mappings: mappings})
	return err
}

// StartCopyThreads has the drivers of processes copy by so many threads each, the driver's own
// among them, until StopCopyThreads. The threads named, one of each process, make the system calls
// for that; they must not be frozen nor held. Where it cannot be done, the driver copies by itself,
// and a note says why.
func (s *Session) StartCopyThreads(threads []Thread, n int) (notes []string, err error) {
	s.copies = true
	r, err := s.call("start copy threads", order{Op: opStartCopy, Threads: threads, CopyThreads: n})
	return r.Notes, err
}

// StopCopyThreads ends what StartCopyThreads began, and returns notes for the log. Other threads of
// the processes may run. After an error a process may still have its memcpy by code of ours, which
// does what memcpy does.
func (s *Session) StopCopyThreads() (notes []string, err error) {
	if !s.copies {
		return nil, nil
	}
	s.copies = false
	r, err := s.call("stop copy threads", order{Op: opStopCopy})
	return r.Notes, err
}

// Close ends the tracer, which lets go of everything, with ErrTracerGone if it had ended before.
func (s *Session) Close() error {
	gone := !s.Alive()
	if err := s.Worker.Close(); err != nil {
		return err
	}
	if gone {
		return ErrTracerGone
	}
	return nil
}

func (s *Session) call(doing string, o order) (reply, error) {
	within := worker.LongOrder
	switch o.Op {
	case opHold, opRelease, opSteer:
		within = worker.ShortOrder
	}
	return worker.Order[reply](s.Worker, doing, o, within)
}

// IsTracer reports whether this process was started to be a tracer: main then calls only Main.
func IsTracer() bool { return kind.IsSelf() }
