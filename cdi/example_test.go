// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"fmt"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/cdi"
)

// Find the GPUs that a container's spec grants, and decide which of them take the
// place of a checkpoint's.
func Example() {
	request := cdi.Read(&specs.Spec{Linux: &specs.Linux{Devices: []specs.LinuxDevice{
		{Path: "/dev/nvidia0", Type: "c", Major: 195, Minor: 0},
		{Path: "/dev/nvidiactl", Type: "c", Major: 195, Minor: 255},
	}}})
	fmt.Println(request, request.Complete())

	const gib = 1 << 30
	here := cdi.GPU{UUID: "GPU-5af7c0da-0000-4000-8000-000000000000", Name: "NVIDIA H200", Memory: 141 * gib, Free: 140 * gib}
	there := cdi.GPU{UUID: "GPU-5af7c0da-0000-4000-8000-000000000009", Name: "NVIDIA H200", Memory: 141 * gib, Index: 3}
	need := cdi.Requirement{GPUs: []cdi.GPU{there}, Processes: []cdi.ProcessUse{{GPUs: []string{there.UUID}, Bytes: 16 * gib}}}
	pairs, err := cdi.Pairs(need, []cdi.GPU{here}, "")
	if err != nil {
		panic(err)
	}
	fmt.Println(pairs[0].Old, "->", pairs[0].New)

	here.Free = 8 * gib
	_, err = cdi.Pairs(need, []cdi.GPU{here}, "")
	fmt.Println(err)
	// Output:
	// linux.devices: /dev/nvidia0 true
	// GPU-5af7c0da-0000-4000-8000-000000000009 (NVIDIA H200) -> GPU-5af7c0da-0000-4000-8000-000000000000 (NVIDIA H200)
	// the GPUs do not fit the checkpoint: too little free memory: nothing can take the place of GPU-5af7c0da-0000-4000-8000-000000000009 (NVIDIA H200): GPU 0, GPU-5af7c0da-0000-4000-8000-000000000000 (NVIDIA H200), has 8GiB of memory free, and the state of GPU-5af7c0da-0000-4000-8000-000000000009 needs 16GiB; end what uses the memory (nvidia-smi shows it), or choose another GPU
}
