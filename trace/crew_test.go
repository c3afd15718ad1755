// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
)

// However many areas are filled at once, the drivers' threads have processors of
// their own, as far as there are any.
func TestCrewSparesProcessors(t *testing.T) {
	for _, drivers := range []int{0, 1, runtime.NumCPU(), 2 * runtime.NumCPU()} {
		c := newCrew()
		for range drivers {
			c.spare()
		}
		most := max(1, runtime.NumCPU()-drivers)
		var working, peak atomic.Int32
		var all sync.WaitGroup
		for range 4 * runtime.NumCPU() {
			all.Go(func() {
				for range 50 {
					c.begin()
					for n := working.Add(1); ; {
						seen := peak.Load()
						if n <= seen || peak.CompareAndSwap(seen, n) {
							break
						}
					}
					runtime.Gosched()
					working.Add(-1)
					c.end()
				}
			})
		}
		all.Wait()
		if got := int(peak.Load()); got > most {
			t.Errorf("%d drivers: %d threads filled at once, want %d at most", drivers, got, most)
		}
	}
}
