// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"cmp"
	"os"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
)

// known is what NVML knows of a GPU and CUDA does not.
type known struct {
	index, minor int // minor: N of /dev/nvidiaN; CUDA's ordinals are by speed, the files by bus
	name, bus    string
	memory, free uint64 // bytes; free is 0 if unknown
	mig, vgpu    bool
}

// askNVML returns what NVML knows, by UUID, and whether it knows all of every GPU.
func askNVML() (found map[string]known, all bool) {
	found = map[string]known{}
	done := useNVML("nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetMinorNumber")
	if done == nil {
		return found, false
	}
	defer done()
	count, r := nvml.DeviceGetCount()
	if r != nvml.SUCCESS {
		return found, false
	}
	all = true
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
			k := more(device, known{index: i, minor: minor})
			all = all && k.name != "" && k.bus != "" && k.memory != 0
			found[id] = k
		}
	}
	return found, all && len(found) == count
}

// more adds what not every driver or GPU reports.
func more(device nvml.Device, k known) known {
	if has("nvmlDeviceGetName") {
		k.name, _ = device.GetName()
	}
	if has("nvmlDeviceGetPciInfo_v3") {
		if pci, r := device.GetPciInfo(); r == nvml.SUCCESS {
			k.bus = unix.ByteSliceToString(pci.BusIdLegacy[:])
		}
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

// gpu returns the GPU with a UUID.
func (k known) gpu(id string) cuda.GPU {
	return cuda.GPU{UUID: id, Name: k.name, Memory: k.memory, Index: k.index, Minor: k.minor, PCIBusID: k.bus, Free: k.free, VGPU: k.vgpu}
}

// infoEarly lists the GPUs that this process is to see, without CUDA. ok is false
// where not all is known of them.
func infoEarly(f facts) (_ wire.Reply, ok bool) {
	if !f.all || f.version == "" {
		return wire.Reply{}, false
	}
	if tooOld(f.version) {
		return wire.Reply{Fault: wire.FaultTooOld, Text: f.version}, true
	}
	visible, restricted := os.LookupEnv(wire.VisibleEnv)
	seen := strings.Split(visible, ",")
	return answer(cuda.Info{
		DriverVersion: f.version,
		GPUs:          list(f.gpus, func(id string, k known) bool { return !k.mig && (!restricted || slices.Contains(seen, id)) }),
		Partitioned:   partitioned(f.gpus),
	}), true
}

// partitioned are the GPUs in MIG mode.
func partitioned(all map[string]known) []cuda.GPU {
	return list(all, func(_ string, k known) bool { return k.mig })
}

// list returns some of the GPUs, in NVML's order.
func list(all map[string]known, pick func(id string, k known) bool) []cuda.GPU {
	var gpus []cuda.GPU
	for id, k := range all {
		if pick(id, k) {
			gpus = append(gpus, k.gpu(id))
		}
	}
	slices.SortFunc(gpus, func(a, b cuda.GPU) int { return cmp.Compare(a.Index, b.Index) })
	return gpus
}
