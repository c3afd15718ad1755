// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/gpuckpt/gpuckpt/internal/gpu/ptrace"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
	"github.com/gpuckpt/gpuckpt/internal/node/worker"
)

// Breath is how long threads run at most that have a lock which a thread of the driver waits for: enough to
// leave malloc, or fork of a large process.
const Breath = 2 * time.Millisecond

// OfDriver reports whether a thread is the driver's own, by its name. Such a thread must not run while GPU
// state is away: one wakes by a timer and reads what it has mapped of a GPU (decision 0014).
func OfDriver(pid, tid int) bool { return strings.HasPrefix(proc.ThreadName(pid, tid), "cuda") }

type tracer struct {
	tuning
	hold  *ptrace.Hold
	steer []*steering
	// copying are the processes with copy threads.
	copying []copying
	// kept are the files of areas whose steering has ended, open for those who know this process's descriptors.
	kept []*os.File
}

// tuning is what tests change of a tracer.
type tuning struct {
	// step is called after all that a tracer does to a thread. A test ends the tracer there.
	step   func(string)
	filler *staging.Filler
	// throttledArea is the smallest area, in bytes, whose driver is kept behind the
	// filling when copy threads copy to it: smaller areas are filled first.
	throttledArea uint64
	// untracedArea is the smallest area, in bytes, during whose copy system calls are let by, and
	// untracedLeft what is left of it when they are traced again: the driver may map another area
	// then. The bus takes 5 ms for untracedLeft.
	untracedArea, untracedLeft uint64
}

func usualTuning() tuning {
	return tuning{
		step: func(string) {}, filler: staging.NewFiller(),
		throttledArea: 1 << 30, untracedArea: 1 << 30, untracedLeft: 256 << 20,
	}
}

// Each hold and each steering has a thread of its own, whose end detaches what it traced. The
// process's first thread, which ends only with the process, must not be one. Go promises that the
// first goroutine is on the first thread only until main begins: the tracer locks it there.
func init() {
	if IsTracer() {
		runtime.LockOSThread()
	}
}

// Main is a tracer's whole life: it carries out orders until its socket ends.
func Main() { serve(usualTuning()) }

func serve(how tuning) {
	t := tracer{tuning: how}
	worker.Obey(kind, t.do)
}

func (t *tracer) do(o order) (r reply, err error) {
	switch o.Op {
	case opHold:
		if t.hold != nil {
			return r, errors.New("threads are held already")
		}
		t.hold, err = ptrace.HoldThreads(o.Processes, o.Except, isCopyThread, OfDriver)
	case opRelease:
		if t.hold == nil {
			return r, errors.New("no threads are held")
		}
		t.hold.Release()
		t.hold = nil
	case opBreathe:
		if t.hold == nil {
			return r, errors.New("no threads are held")
		}
		wait := proc.Waiting(o.Target.TID)
		t.hold.Breathe(o.Target.PID, Breath, func() bool { return proc.Waiting(o.Target.TID) != wait })
	case opSteer:
		var s *steering
		if s, err = steer(o.Target, t.tuning); err == nil {
			t.steer = append(t.steer, s)
		}
	case opStop:
		r.Areas, err = stop(t.steer)
	case opCommit:
		r, t.kept, err = commit(t.steer, t.kept)
		t.steer = nil
	case opAbort:
		r, t.kept, err = abort(t.steer, t.kept)
		t.steer = nil
	case opMap:
		err = mapAll(o.Mappings, t.step)
	case opStartCopy:
		var more []copying
		more, r.Notes = startCopyThreads(o.Threads, o.CopyThreads, t.step)
		t.copying = append(t.copying, more...)
	case opStopCopy:
		r.Notes, err = stopCopyThreads(t.copying, t.step)
		t.copying = nil
	default:
		err = fmt.Errorf("unknown order %q", o.Op)
	}
	return r, err
}
