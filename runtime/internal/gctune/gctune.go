// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package gctune has a shim collect garbage less often while it works.
//
// containerd's package for shims sets GOGC to 40, since a shim does next to nothing for days. Its heap
// is then collected after each 1.6 MB. A restore reads images into 13 MB, nearly all of it garbage:
// 13 collections took half of the shim's processor time, which was 101 ms without a burst and 48 ms
// with one.
package gctune

import (
	"runtime/debug"
	"sync"
	"time"
)

const (
	// percent is GOGC meanwhile. The heap is collected after 16 MB, and grows to 5 times what is in
	// use at most. The bounds of images (criu/image) bound that.
	percent = 400
	// most is when garbage is collected at the latest, in bytes. A container with very many files or threads has
	// the shim read much of /proc.
	most = 48 << 20
	// lasts is longer than small operations take, and than the time from a Create to its Start. GOGC
	// would be changed back in between, which has the heap collected. A long operation has no hurry.
	lasts = 30 * time.Second
)

var (
	mu     sync.Mutex
	before int         // GOGC outside of bursts
	over   *time.Timer // ends the burst; nil outside of one
)

// Begin begins a burst, which ends by itself, or has the one under way last as long from now on.
func Begin() {
	mu.Lock()
	defer mu.Unlock()
	if over != nil && over.Reset(lasts) {
		return
	}
	if over == nil {
		before = debug.SetGCPercent(percent)
		debug.SetMemoryLimit(most)
	}
	var own *time.Timer
	own = time.AfterFunc(lasts, func() {
		mu.Lock()
		defer mu.Unlock()
		if over == own { // else there is a later burst
			debug.SetGCPercent(before)
			over = nil
		}
	})
	over = own
}
