// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package suspend

import (
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// driver615 makes the software GPU's a driver with custom storage. No other that has it was at hand.
const driver615 = "driver=615.71-softcuda\ncuda=13040\n"

// A container is suspended by custom storage, in memory and on a disk, and resumed on the GPU that it had and on another. A
// driver that fails to restore leaves it suspended.
func TestCustomStorage(t *testing.T) {
	for name, test := range map[string]struct {
		settings string
		spill    bool
	}{
		"memory":    {},
		"disk":      {spill: true},
		"unsteered": {settings: "steer = false\n", spill: true},
	} {
		t.Run(name, func(t *testing.T) {
			results.Add(t)
			shared.SoftwareGPU(t, driver615)
			shared.Configured(t, shared.Staging("staging", "custom_storage = true\n"+test.settings))
			var flags []string
			if test.spill {
				flags = []string{"--spill", diskDir(t)}
			}
			k := shared.Work(t, harness.RunSpec{GPUs: []int{0, 1}}, "pattern", "--gpus", "1", "--bytes", "32M", "--seed", "9")
			k.Expect(t, "verify", "bad=0")
			free, _ := memory(t, 0, k)
			suspend(t, shared, k, flags...)
			hasNone(t, 0, k, free)
			if taken := stagingMemory(t, "staging"); test.spill == (taken >= 32<<20) {
				t.Errorf("%d bytes of host memory are taken", taken)
			}
			shared.SoftwareGPU(t, driver615+"fail=restore:2\n")
			for range 2 {
				harness.Says(t, gpuckpt(t, shared, "resume", k.ID), "restore CUDA process", "CUDA_ERROR_OUT_OF_MEMORY", "stays suspended")
				isPaused(t, shared, k, true)
			}
			shared.SoftwareGPU(t, driver615)
			resume(t, shared, k)
			k.Expect(t, "verify", "bad=0")
			suspend(t, shared, k, flags...)
			resume(t, shared, k, "--gpus", "1,0")
			k.Expect(t, "verify", "bad=0")
			k.Expect(t, "write 500", "wrote 500")
			k.Expect(t, "verify", "bad=0")
		})
	}
}
