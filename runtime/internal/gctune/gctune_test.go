// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gctune

import (
	"runtime/debug"
	"testing"
	"testing/synctest"
	"time"
)

func percentNow() int {
	now := debug.SetGCPercent(-1)
	debug.SetGCPercent(now)
	return now
}

// A burst changes GOGC until it is over, and is over once after the last Begin.
func TestBegin(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(40))
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(-1))
	synctest.Test(t, func(t *testing.T) {
		for range 2 {
			Begin()
			time.Sleep(lasts - time.Second)
			Begin()
			time.Sleep(lasts - time.Second)
			if now := percentNow(); now != percent || debug.SetMemoryLimit(-1) != most {
				t.Errorf("GOGC is %d in a burst, and the limit %d", now, debug.SetMemoryLimit(-1))
			}
			time.Sleep(2 * time.Second)
			synctest.Wait()
			if now := percentNow(); now != 40 {
				t.Errorf("GOGC is %d after a burst", now)
			}
		}
	})
}
