// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

// ImageRun is one checkpoint of a program as an image in containerd, and a
// container from it again. Times are the client's, in seconds.
type ImageRun struct {
	ImageOutcome
	// Method is ours, the command line gpuckpt, or stock: ctr with runc's shim,
	// and the CUDA steps by hand.
	Method string `json:"method"`
	// Compression is that of the layers of ours, "none" or "zstd".
	Compression string `json:"compression,omitempty"`
	// Checkpoint is "gpuckpt checkpoint --image", or two CUDA steps and "ctr
	// containers checkpoint".
	Checkpoint float64 `json:"checkpointSeconds"`
	// Dump and Build are gpuckpt's own: until the shim had answered, and making
	// the image, which begins before that.
	Dump  float64 `json:"dumpSeconds,omitempty"`
	Build float64 `json:"buildSeconds,omitempty"`
	// Stored is by how much containerd's content store grew, in bytes.
	Stored uint64 `json:"storedBytes"`
	// Flush is how long the image then took to be on the disk for good, on a disk. Each restore
	// after it begins with nothing of the image in memory.
	Flush float64 `json:"flushSeconds,omitempty"`
	// Restore is "gpuckpt restore", which unpacks the image, or "ctr containers
	// restore" and two CUDA steps.
	Restore float64 `json:"restoreSeconds"`
	// Resume is, of ours, ctr starting a container of the image, unpacked before.
	Resume float64 `json:"resumeSeconds,omitempty"`
}

// ImageOutcome is what there is to say of each run of a checkpoint image.
type ImageOutcome struct {
	// Size is the GPU memory, Host the host memory beside it, in bytes, and Media where containerd is; empty for a tmpfs.
	Size  uint64 `json:"sizeBytes"`
	Host  uint64 `json:"hostBytes,omitempty"`
	Media string `json:"media,omitempty"`
	Round int    `json:"round"`
	// Verified says that every bit was right after each restore. A run that is
	// not counts for nothing.
	Verified bool   `json:"verified"`
	Error    string `json:"error,omitempty"`
	// Whole is what the run cost of the budget, in seconds.
	Whole float64 `json:"wholeSeconds"`
}
