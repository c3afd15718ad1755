// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// The driver's thread works while all others of its process stand still, wherever they were. One of them
// may have a lock that the driver needs: fork has all of malloc's until it is through, and a thread is
// as likely to be stopped at fork's end as anywhere. So the others run for a moment when the driver's
// thread has waited for the same lock for too long. Calls of CUDA wait meanwhile, as they do from the
// lock to the unlock, and CRIU reads no memory yet, or has read it.
const (
	lockLook  = 50 * time.Millisecond
	lockLooks = 4 // in a row at the same wait are too long
	// gateBreath is how long threads run that CRIU's plugin lets go, at most gateThreads at once: it
	// counts up to 256 (plugin.c), drivers' threads among them.
	gateBreath  = 2 * time.Millisecond
	gateThreads = 128
)

// whileLocked has the other threads breathe, by the pid of their process, whenever the driver's thread of
// one of procs waits for a lock that nobody gives it. stop returns when no breath is under way.
func whileLocked(ctx context.Context, procs cuda.Group, breathe func(pid int) error) (stop func()) {
	end := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		look := time.NewTicker(lockLook)
		defer look.Stop()
		before, looks := make([]string, len(procs)), make([]int, len(procs))
		for {
			select {
			case <-end:
				return
			case <-look.C:
			}
			for i, p := range procs {
				wait := proc.Waiting(p.PID.Host, p.RestoreThread.Host)
				if wait == "" || wait != before[i] {
					before[i], looks[i] = wait, 1
					continue
				}
				if looks[i]++; looks[i] < lockLooks {
					continue
				}
				looks[i] = 0
				err := breathe(p.PID.Host)
				log.G(ctx).WithError(err).Infof("the driver's thread of process %d waited for a lock of another thread: the others ran for a moment", p.PID.Host)
			}
		}
	})
	return sync.OnceFunc(func() {
		close(end)
		watch.Wait()
	})
}

// breatheAtGate has CRIU's plugin let the threads of a process run for a moment, but for the drivers'
// threads, which it has let go already. After an error some may still run.
func breatheAtGate(gate Gate, pid int, free []int) error {
	tids, err := proc.Threads(pid)
	if err != nil {
		return err
	}
	tids = slices.DeleteFunc(tids, func(tid int) bool { return slices.Contains(free, tid) })
	for some := range slices.Chunk(tids, gateThreads) {
		for _, tid := range some {
			if err := gate.Free(tid); err != nil {
				return err
			}
		}
		time.Sleep(gateBreath)
		for _, tid := range some {
			if err := gate.Hold(tid); err != nil {
				return err
			}
		}
	}
	return nil
}
