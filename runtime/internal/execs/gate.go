// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package execs keeps processes that are exec'd into a container apart from its checkpoints. CRIU
// dumps the tree of the container's first process, and an exec'd process is not in that tree.
//
// The life of a Gate: it is open while the container runs, and each start of an exec'd process
// passes it (Enter). A checkpoint, or a pause that one may follow, closes the gate (Hold) and
// waits until the exec'd processes have ended (Drain). New ones wait at the gate. When the
// container runs on, they start (LetIn). When the container ends, they fail (End).
package execs

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"
)

// Gate is where starts of exec'd processes pass, one for each container. The zero Gate is open.
type Gate struct {
	mu       sync.Mutex
	starting int           // that have passed, and are not in the container yet
	held     bool          // see Hold
	closed   int           // see Close
	ended    error         // see End
	changed  chan struct{} // closed, and replaced, when one of these changes; nil while nobody waits
}

// Enter waits until the gate is open, at most as long as within. leave must be called when the
// process is in the container, or has failed to start.
func (g *Gate) Enter(ctx context.Context, within time.Duration) (leave func(), err error) {
	var over <-chan time.Time
	for {
		g.mu.Lock()
		if g.ended != nil {
			defer g.mu.Unlock()
			return nil, g.ended
		}
		if !g.held && g.closed == 0 {
			g.starting++
			g.mu.Unlock()
			return func() { g.change(func() { g.starting-- }) }, nil
		}
		changed := g.next()
		g.mu.Unlock()
		if over == nil {
			timer := time.NewTimer(within)
			defer timer.Stop()
			over = timer.C
		}
		select {
		case <-changed:
		case <-over:
			return nil, fmt.Errorf("cannot exec in the container: it is paused or being checkpointed, and the exec has waited %v for it to go on: try again: %w", within, errdefs.ErrFailedPrecondition)
		case <-ctx.Done():
			return nil, fmt.Errorf("wait until the container goes on after its checkpoint: %w", context.Cause(ctx))
		}
	}
}

// Hold closes the gate until LetIn is called.
func (g *Gate) Hold() { g.change(func() { g.held = true }) }

// LetIn opens a gate that Hold has closed.
func (g *Gate) LetIn() { g.change(func() { g.held = false }) }

// Close keeps further processes out until reopen is called.
func (g *Gate) Close() (reopen func()) {
	g.change(func() { g.closed++ })
	return sync.OnceFunc(func() { g.change(func() { g.closed-- }) })
}

// End lets nobody in any more: the container has ended, for this reason.
func (g *Gate) End(why string) {
	g.change(func() {
		g.ended = fmt.Errorf("cannot exec in the container: %s: %w", why, errdefs.ErrFailedPrecondition)
	})
}

// Settle waits until nobody is on their way in, at most as long as within: in a container that is frozen they
// never arrive. The gate must be closed. The error is that of RefuseStarting, or says that ctx is done.
func (g *Gate) Settle(ctx context.Context, within time.Duration) error {
	over := time.NewTimer(within)
	defer over.Stop()
	for {
		g.mu.Lock()
		starting, changed := g.starting, g.next()
		g.mu.Unlock()
		if starting == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-over.C:
			return g.RefuseStarting()
		case <-ctx.Done():
			return fmt.Errorf("wait for processes that are being exec'd: %w", context.Cause(ctx))
		}
	}
}

// RefuseStarting returns an error while a process is on its way in.
func (g *Gate) RefuseStarting() error {
	if g.onTheirWay() > 0 {
		return fmt.Errorf("a process is being exec'd into the container: try again: %w", errdefs.ErrUnavailable)
	}
	return nil
}

// onTheirWay returns how many processes have passed and are not in the container yet.
func (g *Gate) onTheirWay() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.starting
}

// change changes the gate, and wakes those who wait at it.
func (g *Gate) change(do func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	do()
	if g.changed != nil {
		close(g.changed)
		g.changed = nil
	}
}

// next returns a channel that is closed when the gate changes. g.mu is held.
func (g *Gate) next() <-chan struct{} {
	if g.changed == nil {
		g.changed = make(chan struct{})
	}
	return g.changed
}
