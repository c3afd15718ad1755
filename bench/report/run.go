// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import "github.com/gpuckpt/gpuckpt/images"

// Run is one measurement of a method: a checkpoint and a restore from it.
type Run struct {
	Shape
	Method string `json:"method"`
	Round  int    `json:"round"`
	// Verified says that every bit was right after the restore, and after a
	// checkpoint that left the program running. A run that is not counts for
	// nothing.
	Verified bool   `json:"verified"`
	Error    string `json:"error,omitempty"`
	// ImageBytes is the space that the images take.
	ImageBytes uint64    `json:"imageBytes"`
	Checkpoint Operation `json:"checkpoint"`
	Restore    Operation `json:"restore"`
	// Flush is how long the images then took to be on the disk for good, in
	// seconds; with images on a disk only.
	Flush float64 `json:"flushSeconds,omitempty"`
	// Whole is what the run cost of the budget, in seconds.
	Whole float64 `json:"wholeSeconds"`
}

// Operation is what was measured of one checkpoint or restore. Times are in
// seconds.
type Operation struct {
	// Seconds is the whole, from the client's first request to the last
	// answer: of a checkpoint, the pause before it is part.
	Seconds float64 `json:"seconds"`
	// Pause is the client's pause before the checkpoint.
	Pause float64 `json:"pauseSeconds,omitempty"`
	// Down is, of a checkpoint that leaves the program running, the time from
	// the first request until it may run again.
	Down float64 `json:"downSeconds,omitempty"`
	// Gap is the longest time for which the program did not answer a client.
	Gap float64 `json:"gapSeconds,omitempty"`
	// Driver is what the driver's calls took, where that is known: of the
	// operation without the way back of one that leaves the program running.
	Driver float64 `json:"driverSeconds,omitempty"`
	// Covered is the share of Seconds, without Pause, that the phases explain.
	Covered float64 `json:"covered,omitempty"`
	// Phases begin at the request that the shim gets after the pause.
	Phases []images.Phase `json:"phases,omitempty"`
	// Memory is what it took of the machine's.
	Memory MemoryPeak `json:"peakMemory"`
	// CgroupPeak is the most that the container's own cgroup was charged with
	// since its start, in bytes.
	CgroupPeak uint64 `json:"cgroupPeakBytes,omitempty"`
	// StagingPeak is the same of the cgroup for GPU state, of a checkpoint where
	// that is what is measured.
	StagingPeak uint64 `json:"stagingPeakBytes,omitempty"`
}

// MemoryPeak is how much memory an operation took at its most, in bytes, over
// what was in use when it began.
type MemoryPeak struct {
	// Used is by how much available memory fell.
	Used uint64 `json:"usedBytes"`
	// Shmem is by how much files in memory grew, images on a tmpfs among them.
	Shmem uint64 `json:"shmemBytes"`
}
