// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// The driver's threads work while all others of the process stand still, wherever they were. One of them
// may have a lock that the driver needs: fork has all of malloc's until it is through, and a thread is
// as likely to be stopped at fork's end as anywhere. So the others run for a moment when a driver's
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

// whileLocked has the others breathe whenever one of these threads waits for a lock that nobody gives it.
// stop returns when no breath is under way.
func whileLocked(ctx context.Context, tids []int, breathe func(tid int) error) (stop func()) {
	end := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		look := time.NewTicker(lockLook)
		defer look.Stop()
		before, looks := make([]string, len(tids)), make([]int, len(tids))
		for {
			select {
			case <-end:
				return
			case <-look.C:
			}
			for i, tid := range tids {
				wait := proc.Waiting(tid)
				if wait == "" || wait != before[i] {
					before[i], looks[i] = wait, 1
					continue
				}
				if looks[i]++; looks[i] < lockLooks {
					continue
				}
				looks[i] = 0
				err := breathe(tid)
				log.G(ctx).WithError(err).Infof("thread %d of the driver waited for a lock of another thread: the others ran for a moment", tid)
			}
		}
	})
	return sync.OnceFunc(func() {
		close(end)
		watch.Wait()
	})
}

// breatheAtGate has CRIU's plugin let the other threads of a process run for a moment: not those in free,
// which it has let go already, nor threads of ours that it does not trace. After an error some may still run.
func breatheAtGate(gate Gate, tid int, free []int) error {
	status, err := proc.StatusOf(tid)
	if err != nil {
		return err
	}
	tids, err := proc.Threads(status.Process())
	if err != nil {
		return err
	}
	tids = slices.DeleteFunc(tids, func(tid int) bool {
		status, err := proc.StatusOf(tid)
		return err != nil || status.Tracer() == 0 || slices.Contains(free, tid)
	})
	for some := range slices.Chunk(tids, gateThreads) {
		var errs []error
		for i, tid := range some {
			if err := gate.Loose(tid); err != nil {
				errs, some = append(errs, err), some[:i]
				break
			}
		}
		time.Sleep(gateBreath)
		for _, tid := range some {
			errs = append(errs, gate.Hold(tid))
		}
		if err := errors.Join(errs...); err != nil {
			return err
		}
	}
	return nil
}
