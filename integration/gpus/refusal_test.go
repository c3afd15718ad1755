// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpus

import (
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// What a spec grants that will not do is refused before anything is made, with
// what was asked and what is there; afterwards the checkpoint still restores.
func TestRefusedGrants(t *testing.T) {
	result := two(t)
	k := start(t, harness.RunSpec{GPUs: []int{0, 1}}, pattern(2)...)
	k.Expect(t, "verify", "bad=0")
	dir := checkpointed(t, result, k)
	both := []int{0, 1}
	for _, test := range []struct {
		name  string
		spec  harness.RunSpec
		words []string
	}{
		{"none", harness.RunSpec{}, []string{"2 GPUs", uuid(0), uuid(1), "granted none", "asks for no GPU"}},
		{"too few", harness.RunSpec{GPUs: []int{1}}, []string{"2 GPUs", "granted 1 GPU: " + uuid(1), "/dev/nvidia"}},
		{"a share by MPS", harness.RunSpec{GPUs: both, Env: []string{"CUDA_MPS_PIPE_DIRECTORY=/mps"}}, []string{"MPS", "/mps"}},
		{"a MIG instance", harness.RunSpec{GPUs: both, Env: []string{"NVIDIA_VISIBLE_DEVICES=MIG-12345678-0000-0000-0000-000000000000"}}, []string{"MIG"}},
		{"annotation: no GPU of the checkpoint", harness.RunSpec{GPUs: both, Annotations: given("7=0")}, []string{`"7" is no GPU of the checkpoint`, uuid(0)}},
		{"annotation: not granted", harness.RunSpec{GPUs: both, Annotations: given("0=5")}, []string{`"5" is no GPU that the container is granted`, uuid(1)}},
		{"annotation: twice", harness.RunSpec{GPUs: both, Annotations: given("0=1", "1=1")}, []string{"a second time"}},
		{"annotation: no pair", harness.RunSpec{GPUs: both, Annotations: given("0")}, []string{`"0" is not OLD=NEW`}},
	} {
		t.Run(test.name, func(t *testing.T) { refused(t, test.spec, dir, test.words...) })
	}
	r := restored(t, result, harness.RunSpec{GPUs: both}, dir, k.Port)
	r.Expect(t, "verify", "bad=0")
}

// A GPU of this node that will not do.
func TestRefusedGPUs(t *testing.T) {
	result := two(t)
	if gpu.Kind != harness.SoftwareGPU {
		t.Skip("only the software GPU can be another model")
	}
	k := start(t, harness.RunSpec{GPUs: []int{0}}, pattern(1)...)
	k.Expect(t, "verify", "bad=0")
	dir := checkpointed(t, result, k)
	for _, test := range []struct {
		name, lines string
		words       []string
	}{
		{"another model", "gpu1.name=Another GPU\n", []string{"Another GPU", "different models"}},
		{"too little memory", "gpu1.memory_mib=16\n", []string{"16MiB", uuid(1)}},
		{"partitioned", "gpu1.mig=1\n", []string{"MIG", "-mig 0", uuid(1)}},
		{"virtual", "gpu1.vgpu=1\n", []string{"vGPU", uuid(1)}},
	} {
		t.Run(test.name, func(t *testing.T) {
			shared.SoftwareGPU(t, test.lines)
			refused(t, harness.RunSpec{GPUs: []int{1}}, dir, test.words...)
		})
	}
	r := restored(t, result, harness.RunSpec{GPUs: []int{1}}, dir, k.Port)
	r.Expect(t, "verify", "bad=0")
}

// Memory that another container has taken is counted; once that is gone the
// restore works.
func TestMemoryInUse(t *testing.T) {
	result := two(t)
	if gpu.Kind != harness.SoftwareGPU {
		t.Skip("on a real GPU this takes all of its memory")
	}
	k := start(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "40M")
	k.Expect(t, "verify", "bad=0")
	dir := checkpointed(t, result, k)
	shared.SoftwareGPU(t, "gpu1.memory_mib=100\n")
	guest := start(t, harness.RunSpec{ID: harness.Name(t) + "-guest", GPUs: []int{1}}, "pattern", "--bytes", "60M")
	guest.Expect(t, "verify", "bad=0")
	refused(t, harness.RunSpec{GPUs: []int{1}}, dir, "of memory free", "the state of "+uuid(0)+" needs ")
	guest.MustRemove(t)
	r := restored(t, result, harness.RunSpec{GPUs: []int{1}}, dir, k.Port)
	r.Expect(t, "verify", "bad=0")
}
