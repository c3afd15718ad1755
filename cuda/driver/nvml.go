// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"cmp"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
)

// known is what NVML knows of a GPU and CUDA does not tell.
type known struct {
	index, minor int // minor: N of /dev/nvidiaN; CUDA's ordinals are by speed, the files by bus
	name         string
	memory, free uint64 // bytes; free is 0 if unknown
	mig, vgpu    bool
}

// askNVML gives what NVML knows, by UUID.
func askNVML() map[string]known {
	found := map[string]known{}
	done := useNVML("nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetMinorNumber")
	if done == nil {
		return found
	}
	defer done()
	count, r := nvml.DeviceGetCount()
	if r != nvml.SUCCESS {
		return found
	}
	for i := range count {
		device, r := nvml.DeviceGetHandleByIndex(i)
		if r != nvml.SUCCESS {
			continue
		}
		id, r := device.GetUUID()
		if r != nvml.SUCCESS {
			continue
		}
		if minor, r := device.GetMinorNumber(); r == nvml.SUCCESS {
			found[id] = more(device, known{index: i, minor: minor})
		}
	}
	return found
}

// more adds what not every driver or GPU can tell.
func more(device nvml.Device, k known) known {
	if has("nvmlDeviceGetName") {
		k.name, _ = device.GetName()
	}
	if has("nvmlDeviceGetMemoryInfo") {
		if m, r := device.GetMemoryInfo(); r == nvml.SUCCESS {
			k.memory, k.free = m.Total, m.Free
		}
	}
	if has("nvmlDeviceGetMigMode") {
		mode, _, r := device.GetMigMode()
		k.mig = r == nvml.SUCCESS && mode == nvml.DEVICE_MIG_ENABLE
	}
	if has("nvmlDeviceGetVirtualizationMode") {
		mode, r := device.GetVirtualizationMode()
		k.vgpu = r == nvml.SUCCESS && mode == nvml.GPU_VIRTUALIZATION_MODE_VGPU
	}
	return k
}

// partitioned are the GPUs in MIG mode, in NVML's order.
func partitioned(all map[string]known) []wire.GPU {
	var gpus []wire.GPU
	for id, k := range all {
		if k.mig {
			gpus = append(gpus, wire.GPU{UUID: id, Name: k.name, Memory: k.memory, Index: k.index, Minor: k.minor})
		}
	}
	slices.SortFunc(gpus, func(a, b wire.GPU) int { return cmp.Compare(a.Index, b.Index) })
	return gpus
}
