// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
)

// The methods that are compared.
const (
	// Ours is this project's shim, asked by the task API.
	Ours = "ours"
	// Steered is ours with [debug] copy_threads = 0: the driver copies by itself.
	Steered = "steered"
	// ByCRIU is ours with [staging] memory = 0: CRIU moves the host memory by itself.
	ByCRIU = "bycriu"
	// Interposer is ours, with the annotation dev.gpuckpt.interposer.
	Interposer = "interposer"
	// CRIUPlugin is CRIU with its own CUDA plugin, without a container.
	CRIUPlugin = "criugpu"
	// Stock is runc's shim, with the CUDA steps taken by hand before and after.
	Stock = "stock"
)

// Where images lie.
const (
	OnTmpfs = "tmpfs"
	OnDisk  = "disk"
)

// What becomes of the processes after a checkpoint.
const (
	ModeExit  = "exit"
	ModeLeave = "leave"
)

// What the memory holds.
const (
	ContentPattern = "pattern" // random 64-bit words
	ContentZero    = "zero"
	ContentWeights = "weights" // bf16 numbers of small magnitude
	ContentNone    = "none"    // a process without CUDA
)

// HostKinds are the kinds of host memory: a program's own, what the driver has made page-locked
// (cuMemHostAlloc), what it has page-locked of the program's own (cuMemHostRegister), and memory that
// processes can share.
var HostKinds = []string{"pageable", "pinned", "registered", "shared"}

// Shape is what a run is about, but for the method.
type Shape struct {
	Content string `json:"content"`
	// Size is each process's GPU memory, in bytes.
	Size uint64 `json:"sizeBytes"`
	// Procs is the number of CUDA processes, GPUs what they are dealt out to.
	Procs int `json:"procs"`
	GPUs  int `json:"gpus"`
	// Shm is what is in the container's /dev/shm, in bytes: without CUDA only.
	Shm uint64 `json:"shmBytes,omitempty"`
	// Host is the program's host memory, in bytes, and HostKind one of HostKinds; "" is the first.
	Host     uint64 `json:"hostBytes,omitempty"`
	HostKind string `json:"hostKind,omitempty"`
	Media    string `json:"media"`
	Mode     string `json:"mode"`
}

// Bytes is the GPU memory of all processes.
func (s Shape) Bytes() uint64 { return s.Size * uint64(s.Procs) }

// String names the shape for people.
func (s Shape) String() string {
	if s.Content == ContentNone && s.Shm > 0 {
		return fmt.Sprintf("no CUDA, %s in /dev/shm, %s, %s", FormatSize(s.Shm), s.Media, s.Mode)
	}
	if s.Content == ContentNone && s.Host > 0 {
		return fmt.Sprintf("no CUDA, %s of host memory, %s, %s", FormatSize(s.Host), s.Media, s.Mode)
	}
	if s.Content == ContentNone {
		return fmt.Sprintf("no CUDA, %s, %s", s.Media, s.Mode)
	}
	text := FormatSize(s.Size)
	if s.Procs > 1 {
		text = fmt.Sprintf("%d × %s on %d GPU", s.Procs, text, s.GPUs)
		if s.GPUs > 1 {
			text += "s"
		}
	}
	if s.Host > 0 {
		text += fmt.Sprintf(" and %s of %s host memory", FormatSize(s.Host), cmp.Or(s.HostKind, HostKinds[0]))
	}
	return fmt.Sprintf("%s, %s, %s, %s", text, s.Content, s.Media, s.Mode)
}

// suffixes are those of sizes.
var suffixes = []struct {
	name  string
	bytes uint64
}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}}

// FormatSize is parseSize's inverse for whole units, and rounds others.
func FormatSize(bytes uint64) string {
	for _, u := range suffixes {
		if bytes >= u.bytes {
			if bytes%u.bytes == 0 {
				return fmt.Sprintf("%d %s", bytes/u.bytes, u.name)
			}
			return fmt.Sprintf("%.2f %s", float64(bytes)/float64(u.bytes), u.name)
		}
	}
	return fmt.Sprintf("%d B", bytes)
}
