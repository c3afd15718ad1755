// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package digestcheck compares the digests of GPU state that is to be restored, beside CRIU and the driver.
//
// The life of a Check: New makes one without areas, Begin and BeginUnless add some, Wait returns the answer for all, and
// Close ends what is under way.
package digestcheck

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// Check compares digests of areas.
type Check struct {
	ctx     context.Context //nolint:containedctx // of what Close ends
	stop    context.CancelFunc
	start   func(context.Context) (*staging.Digester, error)
	begun   errgroup.Group
	later   errgroup.Group // of BeginUnless
	mu      sync.Mutex     // none of workers begins once ctx has ended
	workers sync.WaitGroup
}

// New returns a Check whose digesters start starts. It outlives ctx.
func New(ctx context.Context, start func(context.Context) (*staging.Digester, error)) *Check {
	c := &Check{start: start}
	c.ctx, c.stop = context.WithCancel(context.WithoutCancel(ctx))
	return c
}

// Begin begins to compare the digests of areas: in a process of its own, or in this one if bytes are still arriving,
// because only this one is told of them. On an error nothing is compared.
func (c *Check) Begin(areas []images.Area) error {
	compare, err := c.begin(areas)
	if err == nil {
		c.begun.Go(compare)
	}
	return err
}

// BeginUnless waits until somebody else may have compared the digests of areas, and begins if he has not. Close does not
// wait for compared.
func (c *Check) BeginUnless(areas []images.Area, compared func() bool) {
	if len(areas) == 0 {
		return
	}
	c.later.Go(func() error {
		if compared() {
			return nil
		}
		compare, err := c.begin(areas)
		if err != nil {
			return err
		}
		return compare()
	})
}

// begin returns what compares, once, and ends.
func (c *Check) begin(areas []images.Area) (compare func() error, err error) {
	switch {
	case len(areas) == 0:
		return func() error { return nil }, nil
	case slices.ContainsFunc(areas, func(a images.Area) bool { return a.Location.Arriving() }):
		return func() error {
			defer host.AllProcessors()()
			err := images.Check(c.ctx, areas, 0, nil)
			if errors.Is(err, images.ErrDamaged) {
				err = fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
			}
			return err
		}, nil
	}
	c.mu.Lock()
	if err := c.ctx.Err(); err != nil {
		c.mu.Unlock()
		return nil, err
	}
	c.workers.Add(1)
	c.mu.Unlock()
	worker, err := c.start(c.ctx)
	if err != nil {
		c.workers.Done()
		return nil, err
	}
	return func() error {
		defer c.workers.Done()
		defer worker.Close() // nobody knows for how long the container is not started
		defer context.AfterFunc(c.ctx, worker.Kill)()
		return Areas(worker, areas)
	}, nil
}

// Areas has a digester compare the digests of areas. An error is an errdefs.ErrDataLoss.
func Areas(worker *staging.Digester, areas []images.Area) error {
	if err := worker.Check(areas); err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
	}
	return nil
}

// Wait returns when the digests of all areas so far are compared. The error is of the first that were wrong. After Close
// it is any.
func (c *Check) Wait() error { return cmp.Or(c.begun.Wait(), c.later.Wait()) }

// WaitBegun is Wait for the areas of Begin alone.
func (c *Check) WaitBegun() error { return c.begun.Wait() }

// Close ends the processes that are at work, and has the rest end. None is started afterwards. It can be called on nil.
func (c *Check) Close() {
	if c != nil {
		c.mu.Lock()
		c.stop()
		c.mu.Unlock()
		c.workers.Wait()
	}
}
