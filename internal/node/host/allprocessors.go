// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"runtime"
	"sync"
)

// busy counts who has asked for AllProcessors and not given them back. before is what this process
// uses otherwise.
var busy struct {
	sync.Mutex
	count, before int
}

// AllProcessors has this process compute on all processors until back is called, once. containerd has
// its shims use two (GOMAXPROCS=2), so that many of them can lie idle side by side: whoever digests
// gigabytes needs more. Several may ask at the same time.
func AllProcessors() (back func()) {
	busy.Lock()
	defer busy.Unlock()
	if busy.count++; busy.count == 1 {
		busy.before = runtime.GOMAXPROCS(max(runtime.NumCPU(), runtime.GOMAXPROCS(0)))
	}
	return func() {
		busy.Lock()
		defer busy.Unlock()
		if busy.count--; busy.count == 0 {
			runtime.GOMAXPROCS(busy.before)
		}
	}
}
