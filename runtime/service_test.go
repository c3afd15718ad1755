// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"runtime/debug"
	"testing"
)

// A shim collects garbage less often than containerd's package has it, and has a limit all the same.
func TestCollectLess(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(40))
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(-1))
	collectLess()
	if percent, most := debug.SetGCPercent(-1), debug.SetMemoryLimit(-1); percent <= 40 || most > 64<<20 {
		t.Errorf("GOGC is %d, and the limit %d", percent, most)
	}
}
