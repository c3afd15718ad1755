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

	"github.com/gpuckpt/gpuckpt/internal/gpu/steer"
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
)

// whileLocked has the others of its process breathe whenever one of these threads waits for a lock that
// nobody gives it. stop returns when no breath is under way.
func whileLocked(ctx context.Context, tids []int, breathe func(pid, tid int) error) (stop func()) {
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
				status, err := proc.StatusOf(tid)
				if err == nil {
					err = breathe(status.Process(), tid)
				}
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
// which it has let go already, nor the driver's own, nor threads of ours, which it does not trace. After an
// error some may still run.
func breatheAtGate(gate Gate, pid, tid int, free []int) error {
	tids, err := proc.Threads(pid)
	if err != nil {
		return err
	}
	wait, errs, loose := proc.Waiting(tid), []error(nil), []int(nil)
	for _, other := range tids {
		status, err := proc.StatusOf(other)
		if err != nil || status.Tracer() == 0 || slices.Contains(free, other) || steer.OfDriver(pid, other) {
			continue
		}
		if err := gate.Loose(other); err != nil {
			errs = append(errs, err)
			continue
		}
		loose = append(loose, other)
	}
	for end := time.Now().Add(steer.Breath); time.Now().Before(end) && proc.Waiting(tid) == wait; {
		time.Sleep(steer.Breath / 20)
	}
	for _, other := range loose {
		errs = append(errs, gate.Hold(other))
	}
	return errors.Join(errs...)
}
