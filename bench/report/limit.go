// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

// LimitResult is what becomes of a container whose memory limit is below its
// GPU memory.
type LimitResult struct {
	Size uint64 `json:"sizeBytes"`
	// Limit is the container's memory limit in bytes; on the software GPU,
	// whose memory counts for the container, that plus Size.
	Limit uint64 `json:"limitBytes"`
	// Ours is a run with this project's shim.
	Ours Run `json:"ours"`
	// Stock is the same tried with runc's shim and the CUDA steps by hand.
	Stock LimitStock `json:"stock"`
}

// LimitStock is how the stock way ended.
type LimitStock struct {
	// OOM says that containerd told of a process killed for the limit.
	OOM bool `json:"oom"`
	// ExitCode is the container's, -1 when it did not end.
	ExitCode int `json:"exitCode"`
	// Error is what the checkpoint answered.
	Error string `json:"error,omitempty"`
}

// killed says that the stock way cost the container its life.
func (s LimitStock) killed() bool { return s.OOM && s.ExitCode == 137 }
