// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package wire

// Survey is the reply to OpSurvey: what NVML tells, also where CUDA itself
// cannot be used.
type Survey struct {
	DriverVersion string   `json:"driver_version"` // empty if unknown
	Devices       []Device `json:"devices"`
}

// Device is one GPU of a survey. A nil pointer is what this NVML, or this GPU,
// does not tell.
type Device struct {
	UUID           string      `json:"uuid"`
	Name           string      `json:"name"`
	Index          int         `json:"index"` // NVML's, nvidia-smi's
	Minor          int         `json:"minor"` // of /dev/nvidiaN; -1 if unknown
	Memory         uint64      `json:"memory"`
	Free           uint64      `json:"free"`
	Persistence    *bool       `json:"persistence,omitempty"`
	MIG            *bool       `json:"mig,omitempty"`
	Virtualization string      `json:"virtualization,omitempty"` // "none", "passthrough", "vgpu", "host-vgpu", "host-vsga"; empty if unknown
	ComputeMode    string      `json:"compute_mode,omitempty"`   // "default", "exclusive-thread", "prohibited", "exclusive-process"
	Users          []DeviceUse `json:"users,omitempty"`
}

// DeviceUse is one process's GPU memory, in bytes, as NVML counts it: with the
// process's contexts. NVML counts pids as the machine does.
type DeviceUse struct {
	PID   int    `json:"pid"`
	Bytes uint64 `json:"bytes"`
}
