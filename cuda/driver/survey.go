// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"math"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
)

// survey asks NVML about the GPUs. The fault is no-driver where there is no
// NVML, which comes with the driver.
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
	if !has("nvmlDeviceGetCount_v2") || !has("nvmlDeviceGetHandleByIndex_v2") {
		return answer(found)
	}
	count, r := nvml.DeviceGetCount()
	if r != nvml.SUCCESS {
		return wire.Reply{Fault: wire.FaultNoDriver, Text: "NVML: " + nvml.ErrorString(r)}
	}
	for i := range count {
		if device, r := nvml.DeviceGetHandleByIndex(i); r == nvml.SUCCESS {
			found.Devices = append(found.Devices, surveyDevice(i, device))
		}
	}
	return answer(found)
}

// surveyDevice asks for all that one GPU reports.
func surveyDevice(index int, device nvml.Device) cuda.Device {
	gpu := cuda.GPU{Index: index, Minor: -1}
	if has("nvmlDeviceGetMinorNumber") {
		if minor, r := device.GetMinorNumber(); r == nvml.SUCCESS {
			gpu.Minor = minor
		}
	}
	if has("nvmlDeviceGetUUID") {
		gpu.UUID, _ = device.GetUUID() // empty where it is refused, as the others
	}
	d := cuda.Device{GPU: more(device, gpu).GPU}
	if has("nvmlDeviceGetPersistenceMode") {
		if mode, r := device.GetPersistenceMode(); r == nvml.SUCCESS {
			d.Persistence = new(mode == nvml.FEATURE_ENABLED)
		}
	}
	if has("nvmlDeviceGetMigMode") {
		if mode, _, r := device.GetMigMode(); r == nvml.SUCCESS {
			d.MIG = new(mode == nvml.DEVICE_MIG_ENABLE)
		}
	}
	if has("nvmlDeviceGetVirtualizationMode") {
		if mode, r := device.GetVirtualizationMode(); r == nvml.SUCCESS {
			d.Virtualization = virtualization[mode]
		}
	}
	if has("nvmlDeviceGetComputeMode") {
		if mode, r := device.GetComputeMode(); r == nvml.SUCCESS {
			d.ComputeMode = computeModes[mode]
		}
	}
	if has("nvmlDeviceGetComputeRunningProcesses_v3") {
		if users, r := device.GetComputeRunningProcesses(); r == nvml.SUCCESS {
			for _, u := range users {
				use := cuda.DeviceUse{PID: int(u.Pid)}
				if u.UsedGpuMemory != math.MaxUint64 { // NVML_VALUE_NOT_AVAILABLE
					use.Bytes = u.UsedGpuMemory
				}
				d.Users = append(d.Users, use)
			}
		}
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
