// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
)

// The packages cuda, cdi and images do not know each other, and each has a GPU of its
// own: the driver's, the one that is paired, and the one on disk.

// gpuOf returns a GPU of this node as cdi describes it.
func gpuOf(g cuda.GPU) cdi.GPU {
	return cdi.GPU{
		UUID: g.UUID, Name: g.Name, Memory: g.Memory, Index: g.Index, Minor: g.Minor,
		PCIBusID: g.PCIBusID, Free: g.Free, VGPU: g.VGPU,
	}
}

// cudaPairs returns pairs as the driver takes them.
func cudaPairs(pairs []cdi.Pair) (all []cuda.Pair) {
	for _, p := range pairs {
		all = append(all, cuda.Pair{Old: p.Old.UUID, New: p.New.UUID})
	}
	return all
}

// describedGPU returns a GPU of this node as gpuckpt.json describes it.
func describedGPU(g cuda.GPU) images.GPU {
	return images.GPU{UUID: g.UUID, Name: g.Name, Memory: g.Memory, Index: g.Index}
}

// savedGPU returns a GPU of gpuckpt.json as cdi describes it.
func savedGPU(g images.GPU) cdi.GPU {
	return cdi.GPU{UUID: g.UUID, Name: g.Name, Memory: g.Memory, Index: g.Index}
}
