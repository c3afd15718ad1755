// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"cmp"
	"math"
	"os"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
)

// ask calls a function if NVML has it: go-nvml aborts the program at a function that is missing.
func ask[T any](function string, call func() (T, nvml.Return)) (value T, r nvml.Return) {
	if nvml.Extensions().LookupSymbol(function) != nil {
		return value, nvml.ERROR_FUNCTION_NOT_FOUND
	}
	return call()
}

// devices calls do with each GPU, by NVML's index, and returns how many there are.
func devices(do func(index int, device nvml.Device)) (count int, r nvml.Return) {
	if count, r = ask("nvmlDeviceGetCount_v2", nvml.DeviceGetCount); r != nvml.SUCCESS {
		return 0, r
	}
	for i := range count {
		device, r := ask("nvmlDeviceGetHandleByIndex_v2", func() (nvml.Device, nvml.Return) { return nvml.DeviceGetHandleByIndex(i) })
		if r == nvml.SUCCESS {
			do(i, device)
		}
	}
	return count, nvml.SUCCESS
}

// askNVML returns what NVML knows of the GPUs, by UUID, and whether that is all of every GPU.
func askNVML() (found map[string]cuda.Device, all bool) {
	found, all = map[string]cuda.Device{}, true
	if nvml.Init() != nvml.SUCCESS {
		return found, false
	}
	defer func() { _ = nvml.Shutdown() }()
	count, r := devices(func(i int, device nvml.Device) {
		d := describe(i, device)
		if d.UUID != "" && d.Minor >= 0 {
			all = all && d.Name != "" && d.PCIBusID != "" && d.Memory != 0
			found[d.UUID] = d
		}
	})
	return found, all && r == nvml.SUCCESS && len(found) == count
}

// describe asks for what CUDA needs NVML for. What is not reported stays empty, and Minor is then
// -1. The index is by bus, as the numbers of the device files are; CUDA's ordinals are by speed.
func describe(index int, device nvml.Device) cuda.Device {
	d := cuda.Device{GPU: cuda.GPU{Index: index, Minor: -1}}
	d.UUID, _ = ask("nvmlDeviceGetUUID", device.GetUUID)
	if minor, r := ask("nvmlDeviceGetMinorNumber", device.GetMinorNumber); r == nvml.SUCCESS {
		d.Minor = minor
	}
	d.Name, _ = ask("nvmlDeviceGetName", device.GetName)
	if pci, r := ask("nvmlDeviceGetPciInfo_v3", device.GetPciInfo); r == nvml.SUCCESS {
		d.PCIBusID = unix.ByteSliceToString(pci.BusIdLegacy[:])
	}
	if m, r := ask("nvmlDeviceGetMemoryInfo", device.GetMemoryInfo); r == nvml.SUCCESS {
		d.Memory, d.Free = m.Total, m.Free
	}
	mig := func() (int, nvml.Return) {
		mode, _, r := device.GetMigMode()
		return mode, r
	}
	if mode, r := ask("nvmlDeviceGetMigMode", mig); r == nvml.SUCCESS {
		d.MIG = new(mode == nvml.DEVICE_MIG_ENABLE)
	}
	if mode, r := ask("nvmlDeviceGetVirtualizationMode", device.GetVirtualizationMode); r == nvml.SUCCESS {
		d.Virtualization, d.VGPU = virtualization[mode], mode == nvml.GPU_VIRTUALIZATION_MODE_VGPU
	}
	return d
}

// infoEarly lists the GPUs that this process is to see, without CUDA; ok: all is known of them.
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
		GPUs:          list(f.gpus, func(d cuda.Device) bool { return !inMIG(d) && (!restricted || slices.Contains(seen, d.UUID)) }),
		Partitioned:   partitioned(f.gpus),
	}), true
}

func partitioned(all map[string]cuda.Device) []cuda.GPU { return list(all, inMIG) }

func inMIG(d cuda.Device) bool { return d.MIG != nil && *d.MIG }

// list returns some of the GPUs, in NVML's order.
func list(all map[string]cuda.Device, pick func(cuda.Device) bool) (gpus []cuda.GPU) {
	for _, d := range all {
		if pick(d) {
			gpus = append(gpus, d.GPU)
		}
	}
	slices.SortFunc(gpus, func(a, b cuda.GPU) int { return cmp.Compare(a.Index, b.Index) })
	return gpus
}

// survey asks NVML, which comes with the driver: without it the fault is no-driver.
func survey() wire.Reply {
	if r := nvml.Init(); r != nvml.SUCCESS {
		why := "libnvidia-ml.so.1 is not installed"
		if r != nvml.ERROR_LIBRARY_NOT_FOUND {
			why = "NVML: " + nvml.ErrorString(r)
		}
		return wire.Reply{Fault: wire.FaultNoDriver, Text: why}
	}
	defer func() { _ = nvml.Shutdown() }()
	found := cuda.Survey{DriverVersion: driverVersion(), Devices: []cuda.Device{}}
	_, r := devices(func(i int, device nvml.Device) { found.Devices = append(found.Devices, surveyDevice(i, device)) })
	if r != nvml.SUCCESS && r != nvml.ERROR_FUNCTION_NOT_FOUND {
		return wire.Reply{Fault: wire.FaultNoDriver, Text: "NVML: " + nvml.ErrorString(r)}
	}
	return answer(found)
}

func surveyDevice(index int, device nvml.Device) cuda.Device {
	d := describe(index, device)
	if mode, r := ask("nvmlDeviceGetPersistenceMode", device.GetPersistenceMode); r == nvml.SUCCESS {
		d.Persistence = new(mode == nvml.FEATURE_ENABLED)
	}
	if mode, r := ask("nvmlDeviceGetComputeMode", device.GetComputeMode); r == nvml.SUCCESS {
		d.ComputeMode = computeModes[mode]
	}
	users, _ := ask("nvmlDeviceGetComputeRunningProcesses_v3", device.GetComputeRunningProcesses)
	for _, u := range users {
		use := cuda.DeviceUse{PID: int(u.Pid)}
		if u.UsedGpuMemory != math.MaxUint64 { // NVML_VALUE_NOT_AVAILABLE
			use.Bytes = u.UsedGpuMemory
		}
		d.Users = append(d.Users, use)
	}
	return d
}

// virtualization and computeModes word NVML's enumerations.
var (
	virtualization = map[nvml.GpuVirtualizationMode]string{
		nvml.GPU_VIRTUALIZATION_MODE_NONE:        "none",
		nvml.GPU_VIRTUALIZATION_MODE_PASSTHROUGH: "passthrough",
		nvml.GPU_VIRTUALIZATION_MODE_VGPU:        "vgpu",
		nvml.GPU_VIRTUALIZATION_MODE_HOST_VGPU:   "host-vgpu",
		nvml.GPU_VIRTUALIZATION_MODE_HOST_VSGA:   "host-vsga",
	}
	computeModes = map[nvml.ComputeMode]string{
		nvml.COMPUTEMODE_DEFAULT:           "default",
		nvml.COMPUTEMODE_EXCLUSIVE_THREAD:  "exclusive-thread",
		nvml.COMPUTEMODE_PROHIBITED:        "prohibited",
		nvml.COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive-process",
	}
)
