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

// known is what NVML knows of a GPU. Its index is by bus, CUDA's ordinals are by speed.
type known struct {
	cuda.GPU
	mig bool
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
			k := more(device, cuda.GPU{UUID: id, Index: i, Minor: minor})
			all = all && k.Name != "" && k.PCIBusID != "" && k.Memory != 0
			found[id] = k
		}
	}
	return found, all && len(found) == count
}

// more adds what not every driver or GPU reports.
func more(device nvml.Device, gpu cuda.GPU) known {
	k := known{GPU: gpu}
	if has("nvmlDeviceGetName") {
		k.Name, _ = device.GetName()
	}
	if has("nvmlDeviceGetPciInfo_v3") {
		if pci, r := device.GetPciInfo(); r == nvml.SUCCESS {
			k.PCIBusID = unix.ByteSliceToString(pci.BusIdLegacy[:])
		}
	}
	if has("nvmlDeviceGetMemoryInfo") {
		if m, r := device.GetMemoryInfo(); r == nvml.SUCCESS {
			k.Memory, k.Free = m.Total, m.Free
		}
	}
	if has("nvmlDeviceGetMigMode") {
		mode, _, r := device.GetMigMode()
		k.mig = r == nvml.SUCCESS && mode == nvml.DEVICE_MIG_ENABLE
	}
	if has("nvmlDeviceGetVirtualizationMode") {
		mode, r := device.GetVirtualizationMode()
		k.VGPU = r == nvml.SUCCESS && mode == nvml.GPU_VIRTUALIZATION_MODE_VGPU
	}
	return k
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
		GPUs:          list(f.gpus, func(k known) bool { return !k.mig && (!restricted || slices.Contains(seen, k.UUID)) }),
		Partitioned:   partitioned(f.gpus),
	}), true
}

// partitioned are the GPUs in MIG mode.
func partitioned(all map[string]known) []cuda.GPU {
	return list(all, func(k known) bool { return k.mig })
}

// list returns some of the GPUs, in NVML's order.
func list(all map[string]known, pick func(known) bool) (gpus []cuda.GPU) {
	for _, k := range all {
		if pick(k) {
			gpus = append(gpus, k.GPU)
		}
	}
	slices.SortFunc(gpus, func(a, b cuda.GPU) int { return cmp.Compare(a.Index, b.Index) })
	return gpus
}
