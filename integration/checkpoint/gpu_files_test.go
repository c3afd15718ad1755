// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A process that was forked after CUDA began keeps files of the GPU open, which neither
// it nor CRIU can do anything with. The checkpoint is refused, and both run on.
func TestForkedAfterCUDA(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}, Ports: 2}, "forked")
	k.Expect(t, "count", "101")
	k.Process(1).Expect(t, "count", "101")
	harness.Says(t, checkpointTask(t, shared, k, t.TempDir()), "has files of a GPU open and was not locked")
	k.Expect(t, "count", "102")
	k.Process(1).Expect(t, "count", "102")
}

// A process that uses NVML alone keeps a file of the driver open, which CRIU cannot dump:
// the checkpoint is refused, and the process runs on.
func TestMonitor(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "monitor")
	k.Expect(t, "count", "101")
	harness.Says(t, checkpointTask(t, shared, k, t.TempDir()))
	k.Expect(t, "count", "102")
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
