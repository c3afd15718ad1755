// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/internal/proc"
	"github.com/gpuckpt/gpuckpt/internal/ptrace"
	"github.com/gpuckpt/gpuckpt/internal/worker"
)

// loosenWithin bounds Loosen, and threadsAtOnce is how many threads one process of it seizes.
const (
	loosenWithin  = 20 * time.Second
	threadsAtOnce = 1000
)

// Loosen makes sure that the threads of frozen processes can be seized. It leaves them frozen, and
// those that a signal has stopped (SIGSTOP, Ctrl-Z) stop again when they are thawed.
//
// PTRACE_SEIZE of a stopped thread waits until the thread has gone over into a stop for its tracer
// (JOBCTL_TRAPPING, kernel/ptrace.c). In a frozen cgroup of version 1 the thread does not get there:
// CRIU, or a Hold, would wait for ever. But the thread is out of its stop by then, and when the tracer
// is killed it is on its way back into it (JOBCTL_STOP_PENDING). The next tracer gets it at once. So a
// process seizes the stopped threads and is killed. Version 2 lets a thread change its stop while it is
// frozen, and there nothing hangs.
//
// The usual container has no stopped threads, and no process is started for it. The processes must stay
// frozen until they are seized. On an error some may be loosened, which they do not notice.
func Loosen(run worker.Run, processes []int) error {
	for began := time.Now(); ; {
		threads, err := maybeStopped(processes)
		if err != nil {
			return err
		}
		stuck := 0
		for some := range slices.Chunk(threads, threadsAtOnce) {
			n, err := seizeInVain(run, some)
			if err != nil {
				return err
			}
			stuck += n
		}
		if stuck == 0 {
			return nil
		}
		if time.Since(began) > loosenWithin {
			return fmt.Errorf("%d stopped threads of the container, of process %s for one, cannot be traced: let them go on (kill -CONT), and try again: %w",
				stuck, proc.Describe(threads[0].PID), errdefs.ErrFailedPrecondition)
		}
	}
}

func maybeStopped(processes []int) (threads []Thread, err error) {
	for _, pid := range processes {
		tids, err := ptrace.Threads(pid)
		if err != nil {
			return nil, err
		}
		for _, tid := range tids {
			if stopped, sure := proc.Stopped(pid, tid); stopped || !sure {
				threads = append(threads, Thread{PID: pid, TID: tid})
			}
		}
	}
	return threads, nil
}

// seizeInVain has a tracer of its own seize threads, kills it, and returns how many it hung at.
func seizeInVain(run worker.Run, threads []Thread) (stuck int, err error) {
	s, err := Start(run, nil)
	if err != nil {
		return 0, err
	}
	r, err := s.call("seize stopped threads", order{Op: opLoosen, Threads: threads})
	s.Kill()
	if cerr := s.Worker.Close(); err == nil {
		err = cerr
	}
	return r.Stuck, err
}
