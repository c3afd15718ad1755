// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpus

import (
	"fmt"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// By custom storage a program's memory of two GPUs is two areas, each of which goes to the GPU that it is paired with: swapped
// and back. No driver that has custom storage was at hand but the software GPU's.
func TestCustomStorage(t *testing.T) {
	result := two(t)
	shared.SoftwareGPU(t, "driver=615.71-softcuda\ncuda=13040\n")
	shared.Configured(t, fmt.Sprintf("cdi_spec_dirs = [%q]\n", cdiDir())+shared.Staging("staging", "custom_storage = true\n"))
	k := start(t, harness.RunSpec{GPUs: []int{0, 1}}, pattern(2)...)
	k.Expect(t, "verify", "bad=0")
	swapped := given(uuid(0)+"="+uuid(1), uuid(1)+"="+uuid(0))
	for range 2 {
		dir := checkpointed(t, result, k)
		for _, p := range metadata(t, dir).Processes {
			if !p.CustomStorage || len(p.Areas) != 2 || p.Areas[0].GPU == p.Areas[1].GPU {
				t.Fatalf("process %d has the areas %+v", p.PID, p.Areas)
			}
		}
		k = restored(t, result, harness.RunSpec{GPUs: []int{0, 1}, Annotations: swapped}, dir, k.Port)
		k.Expect(t, "verify", "bad=0")
		k.Expect(t, "write 300", "wrote 300")
		k.Expect(t, "verify", "bad=0")
	}
}

// A program that had GPU 0 alone goes on with GPU 1 alone.
func TestCustomStorageOnAnotherGPU(t *testing.T) {
	result := two(t)
	shared.SoftwareGPU(t, "driver=615.71-softcuda\ncuda=13040\n")
	shared.Configured(t, fmt.Sprintf("cdi_spec_dirs = [%q]\n", cdiDir())+shared.Staging("staging", "custom_storage = true\n"))
	k := start(t, harness.RunSpec{GPUs: []int{0}}, pattern(1)...)
	k.Expect(t, "verify", "bad=0")
	dir := checkpointed(t, result, k)
	for _, at := range []int{1, 0} {
		k = restored(t, result, harness.RunSpec{GPUs: []int{at}}, dir, k.Port)
		k.Expect(t, "verify", "bad=0")
		isOn(t, k, 0, uuid(at))
		dir = checkpointed(t, result, k)
	}
}
