// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"fmt"

	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
	"github.com/gpuckpt/gpuckpt/internal/worker"
)

// Survey is what NVML reports of the driver and its GPUs, also of a driver that
// is too old for checkpoints or that CUDA cannot use.
type Survey struct {
	DriverVersion string   `json:"driver_version"` // empty if unknown
	Devices       []Device `json:"devices"`
}

// Device is one GPU of a survey. A nil pointer or an empty text is what this NVML,
// or this GPU, does not report. Index is nvidia-smi's.
type Device struct {
	GPU
	Persistence    *bool       `json:"persistence,omitempty"`
	MIG            *bool       `json:"mig,omitempty"`
	Virtualization string      `json:"virtualization,omitempty"` // "none", "passthrough", "vgpu", "host-vgpu", "host-vsga"
	ComputeMode    string      `json:"compute_mode,omitempty"`   // "default", "exclusive-thread", "prohibited", "exclusive-process"
	Users          []DeviceUse `json:"users,omitempty"`
}

// DeviceUse is the GPU memory of one process on one GPU, in bytes, contexts
// included; 0 if the driver does not report it.
type DeviceUse struct {
	PID   int    `json:"pid"` // as the machine counts
	Bytes uint64 `json:"bytes"`
}

// Survey asks NVML, not CUDA. The error is ErrNoDriver where there is no NVML
// or it has no driver to talk to, else the helper's end.
func (h *Helper) Survey(ctx context.Context) (Survey, error) {
	r, err := h.do(ctx, wire.Request{Op: wire.OpSurvey}, h.opts.CallTimeout)
	if err != nil {
		return Survey{}, err
	}
	var s Survey
	if err := worker.Decode(r.Answer, &s); err != nil {
		return Survey{}, fmt.Errorf("survey GPUs: %w: %w", ErrHelperGarbled, err)
	}
	return s, nil
}
