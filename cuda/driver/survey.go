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
	_, r := devices(func(i int, device nvml.Device) { found.Devices = append(found.Devices, surveyDevice(i, device)) })
	if r != nvml.SUCCESS && r != nvml.ERROR_FUNCTION_NOT_FOUND {
		return wire.Reply{Fault: wire.FaultNoDriver, Text: "NVML: " + nvml.ErrorString(r)}
	}
	return answer(found)
}

// surveyDevice asks for all that one GPU reports.
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
