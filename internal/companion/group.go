// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package companion

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/steer"
)

// of returns the companions of the processes that may be taken through steps.
func of(procs cuda.Group) (all []*Companion, err error) {
	for _, p := range procs.Living() {
		if p.State == cuda.Checkpointed { // somebody else's
			continue
		}
		c, err := Find(p.PID.Host)
		if err != nil {
			return nil, err
		}
		if c != nil {
			all = append(all, c)
		}
	}
	return all, nil
}

// Threads returns the threads of the processes' companions, by their tids.
func Threads(procs cuda.Group) (tids []int) {
	all, _ := of(procs) // who cannot be found does nothing
	for _, c := range all {
		tids = append(tids, c.threads()...)
	}
	return tids
}

// TakeDown takes the companions of processes to saved, and returns the bytes of GPU memory that are in
// host memory then. Half of timeout is for the programs' calls and GPU work to end: the rest is left to
// those who lock them if they wait for each other. tracer is asked for
// one when all are parked, and told the bytes of host memory that will be taken; it may refuse. The
// companions' threads are steered by it: their areas are taken with the driver's.
//
// On an error all companions are open again, unless the error says that one could not be opened, and
// the steering is left to the caller to end. The processes must not be frozen.
func TakeDown(ctx context.Context, procs cuda.Group, timeout time.Duration, tracer func(bytes uint64) (*steer.Session, error)) (total uint64, err error) {
	all, err := of(procs)
	if err != nil || len(all) == 0 {
		return 0, err
	}
	defer func() {
		if err == nil && total > 0 {
			return
		}
		if oerr := openAll(context.WithoutCancel(ctx), all); oerr != nil {
			err = errors.Join(err, fmt.Errorf("on the way back: %w", oerr))
		}
	}()
	bytes, err := each(all, func(c *Companion) (uint64, error) {
		now, err := c.ask(ctx, "park", askPark, timeout/2, timeout/2+time.Second)
		return now.bytes, err
	})
	if sum := sumOf(bytes); err != nil || sum == 0 {
		return 0, err
	}
	session, err := tracer(sumOf(bytes))
	if err != nil {
		return 0, err
	}
	for i, c := range all {
		if bytes[i] == 0 {
			continue
		}
		if err := session.Steer(steer.Target{PID: c.PID, TID: c.TID, Name: images.AreaPrefix(c.PID)}); err != nil {
			return 0, err
		}
	}
	bytes, err = each(all, func(c *Companion) (uint64, error) {
		now, err := c.ask(ctx, "save the GPU memory of", askSave, 0, patience)
		return now.bytes, err
	})
	if err != nil {
		return 0, err
	}
	return sumOf(bytes), nil
}

// Open has the companions of processes bring GPU memory back, where it is saved, and let the programs'
// calls reach the driver. One that is open is left alone. On an error programs wait at the gate, with
// their memory safe, and Open can be called again. The processes must be unlocked, and not frozen. Open
// ignores the end of ctx.
func Open(ctx context.Context, procs cuda.Group) error {
	all, err := of(procs)
	if err != nil {
		return err
	}
	return openAll(context.WithoutCancel(ctx), all)
}

// Gate holds the threads of restored processes, as gpustate.Gate.
type Gate interface {
	Free(tid int) error
	Hold(tid int) error
}

// OpenHeld is Open while a gate holds all threads of the processes.
func OpenHeld(ctx context.Context, procs cuda.Group, gate Gate) error {
	all, err := of(procs)
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(c *Companion) bool {
		now, err := c.read()
		return err == nil && now.state == open
	})
	var threads []int
	for _, c := range all {
		threads = append(threads, c.threads()...)
	}
	for _, tid := range threads {
		if err := gate.Free(tid); err != nil {
			return err
		}
	}
	if err := openAll(ctx, all); err != nil {
		return err
	}
	for _, tid := range threads {
		if err := gate.Hold(tid); err != nil {
			return err
		}
	}
	return nil
}

func openAll(ctx context.Context, all []*Companion) error {
	_, err := each(all, func(c *Companion) (uint64, error) {
		if now, err := c.settled(ctx); err != nil || now.state == open || now.state == parking {
			return 0, err
		}
		_, err := c.ask(ctx, "bring back the GPU memory of", askOpen, 0, patience)
		return 0, err
	})
	return err
}

// settled returns what a companion says when it is busy with nothing, or parks: a park that was
// cancelled opens the gate by itself, and may wait for the GPU as long as that works.
func (c *Companion) settled(ctx context.Context) (control, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		now, err := c.read()
		if err != nil || now.request == now.answered || now.state == parking {
			return now, err
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return now, fmt.Errorf("the companion of process %d is still busy: %w", c.PID, ctx.Err())
		}
	}
}

// each calls do for all at once.
func each(all []*Companion, do func(c *Companion) (uint64, error)) ([]uint64, error) {
	values, errs := make([]uint64, len(all)), make([]error, len(all))
	var group sync.WaitGroup
	for i, c := range all {
		group.Go(func() { values[i], errs[i] = do(c) })
	}
	group.Wait()
	return values, errors.Join(errs...)
}

func sumOf(bytes []uint64) (sum uint64) {
	for _, n := range bytes {
		sum += n
	}
	return sum
}
