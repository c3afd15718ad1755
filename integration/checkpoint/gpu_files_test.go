// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"strconv"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A process that was forked after CUDA began keeps files of the GPU open, which it cannot use. It
// is dumped with its parent, and both go on: after a checkpoint, and after a restore.
func TestForkedAfterCUDA(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}, Ports: 2}, "forked")
	k.Expect(t, "count", "101")
	k.Process(1).Expect(t, "count", "101")
	ref := takeCheckpoint(t, shared, k, "forked")
	k.Expect(t, "count", "102")
	k.Process(1).Expect(t, "count", "102")
	for i := range 3 { // each of the one before
		k.MustRemove(t)
		k = restore(t, shared, k.ID, ref, k.Port)
		count := strconv.Itoa(102 + i)
		k.Expect(t, "count", count)
		k.Process(1).Expect(t, "count", count)
		ref = takeCheckpoint(t, shared, k, fmt.Sprintf("forked-%d", i))
	}
}

// A process that uses NVML alone keeps a file of the driver open. It is dumped and restored.
func TestMonitor(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "monitor")
	k.Expect(t, "count", "101")
	ref := takeCheckpoint(t, shared, k, "monitor")
	k.Expect(t, "count", "102")
	k.MustRemove(t)
	r := restore(t, shared, k.ID, ref, k.Port)
	r.Expect(t, "count", "102")
}

// A thread of the driver that reads a mapping of the GPU by a timer does not run while
// the mapping is gone: not in a checkpoint after which the container goes on.
func TestTimerThread(t *testing.T) {
	results.Add(t)
	shared.SoftwareGPU(t, "timer_ms=1\n")
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	for range 3 {
		checkpointInto(t, shared, k, t.TempDir())
	}
	k.Expect(t, "count", "102")
}

// Nor does that thread run in a restore before the GPU state is back: CRIU holds it until then.
func TestTimerThreadRestored(t *testing.T) {
	results.Add(t)
	shared.SoftwareGPU(t, "timer_ms=1\n")
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	ref := takeCheckpoint(t, shared, k, "timer")
	k.MustRemove(t)
	for range 3 {
		r := restore(t, shared, k.ID, ref, k.Port)
		r.Expect(t, "count", "102")
		r.MustRemove(t)
	}
}
