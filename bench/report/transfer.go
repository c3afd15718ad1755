// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

// RegistryRun is two checkpoints of a program that runs on, between which it
// writes to rewrittenPermille of its GPU memory; both are pushed to a registry,
// everything of them is removed here, and what comes back of the second resumes.
// Times are the client's, in seconds.
type RegistryRun struct {
	ImageOutcome
	// LayerBytes is what the GPU state was cut into.
	LayerBytes uint64    `json:"layerBytes"`
	First      SentImage `json:"first"`
	Second     SentImage `json:"second"`
	// Pull is "gpuckpt image pull", which unpacks, and Fetched the bytes that it
	// says came over the wire.
	Pull    float64 `json:"pullSeconds"`
	Fetched uint64  `json:"fetchedBytes"`
	// Resume is ctr starting a container of the image.
	Resume float64 `json:"resumeSeconds"`
	// NextPull is the pull of the second image where the first is, and NextFetched what came over the
	// wire.
	NextPull    float64 `json:"nextPullSeconds,omitempty"`
	NextFetched uint64  `json:"nextFetchedBytes,omitempty"`
	// Alone is the registry's own rate, in bytes a second: all layers of GPU state are fetched without a
	// limit, over as many connections as gpuckpt has, and thrown away.
	Alone float64 `json:"aloneBytesPerSecond,omitempty"`
	// Arrivals are restores while the image arrives, at each of the rates asked for.
	Arrivals []ArrivalRun `json:"arrivals"`
}

// SentImage is a checkpoint image on its way from the program to a registry.
type SentImage struct {
	// Checkpoint is "gpuckpt checkpoint --image --leave-running", and Paused how
	// long the program stood still in it.
	Checkpoint float64 `json:"checkpointSeconds"`
	Paused     float64 `json:"pausedSeconds"`
	// Bytes are those of the checkpoint's layers as stored, Written those that
	// were not in containerd.
	Bytes   uint64 `json:"bytes"`
	Written uint64 `json:"writtenBytes"`
	// GPUWritten and GPUReused are the GPU state's part of them, new and there
	// already.
	GPUWritten uint64 `json:"gpuWrittenBytes"`
	GPUReused  uint64 `json:"gpuReusedBytes"`
	// Push is "gpuckpt image push". Sent is what the registry got of blobs.
	Push float64 `json:"pushSeconds"`
	Sent uint64  `json:"sentBytes"`
	// PushGPU are the bytes of the layers of GPU state, PushGPUReused those that
	// were in the registry.
	PushGPU       uint64 `json:"pushGPUBytes"`
	PushGPUReused uint64 `json:"pushGPUReusedBytes"`
}

// builtShare is the share of the GPU state's bytes that were in containerd when the image was made.
func (s SentImage) builtShare() float64 {
	return float64(s.GPUReused) / float64(max(1, s.GPUWritten+s.GPUReused))
}

// PushedShare is that of the checkpoint's bytes which were pushed.
func (s SentImage) PushedShare() float64 {
	return float64(s.PushGPUReused) / float64(max(1, s.PushGPU))
}

// RewrittenPermille is the share of its GPU memory that the program writes to
// between the checkpoints.
const RewrittenPermille = 10
