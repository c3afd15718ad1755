// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// crew is how many threads fill areas at once, of all processes together: one
// for each processor that no driver's thread works on. More would take turns
// with those threads, which are what a checkpoint waits for: with four processes
// on 64 processors, and as many threads for each, the drivers needed a third
// longer (docs/results, 2026-11-21-h200-second, bench-4on4).
type crew struct {
	mu      sync.Mutex
	changed sync.Cond
	most    int
	working int
}

func newCrew() *crew {
	c := &crew{most: runtime.NumCPU()}
	c.changed.L = &c.mu
	return c
}

// spare leaves a processor to one more driver's thread. One is always left for
// the crew.
func (c *crew) spare() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.most = max(1, c.most-1)
}

// begin waits for a processor; end gives it back.
func (c *crew) begin() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.working >= c.most {
		c.changed.Wait()
	}
	c.working++
}

func (c *crew) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.working--
	c.changed.Signal()
}

// inParallel calls do for [0, size) in chunks, in their order, several at once,
// and gives the first error; chunks after it are not begun.
func (c *crew) inParallel(size, chunk uint64, do func(from, to uint64) error) error {
	var next atomic.Uint64
	var failed atomic.Bool
	var wg sync.WaitGroup
	errs := make(chan error, runtime.NumCPU())
	work := func() bool {
		c.begin() // before a chunk is chosen: whoever waits has none
		defer c.end()
		from := next.Add(chunk) - chunk
		if from >= size || failed.Load() {
			return false
		}
		if err := do(from, min(from+chunk, size)); err != nil {
			failed.Store(true)
			errs <- err
			return false
		}
		return true
	}
	for range runtime.NumCPU() {
		wg.Go(func() {
			for work() {
			}
		})
	}
	wg.Wait()
	select {
	case err := <-errs:
		return err
	default:
		return nil
	}
}
