// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/docker/go-units"
)

// The methods that are compared.
const (
	// ours is this project's shim, asked by the task API.
	ours = "ours"
	// steered is ours with [staging] copy_threads = 0: the driver copies by itself.
	steered = "steered"
	// byCRIU is ours with [staging] memory = 0: CRIU moves the host memory by itself.
	byCRIU = "bycriu"
	// companion is ours, with the annotation dev.gpuckpt.companion.
	companion = "companion"
	// criugpu is CRIU with its own CUDA plugin, without a container.
	criugpu = "criugpu"
	// stock is runc's shim, with the CUDA steps taken by hand before and after.
	stock = "stock"
)

// Where images lie.
const (
	onTmpfs = "tmpfs"
	onDisk  = "disk"
)

// What becomes of the processes after a checkpoint.
const (
	modeExit  = "exit"
	modeLeave = "leave"
)

// What the memory holds.
const (
	contentPattern = "pattern" // random 64-bit words
	contentZero    = "zero"
	contentWeights = "weights" // bf16 numbers of small magnitude
	contentNone    = "none"    // a process without CUDA
)

// isOurs reports whether a method is this project's shim.
func isOurs(method string) bool {
	return method == ours || method == steered || method == companion || method == byCRIU
}

// shape is what a run is about, but for the method.
type shape struct {
	Content string `json:"content"`
	// Size is each process's GPU memory, in bytes.
	Size uint64 `json:"sizeBytes"`
	// Procs is the number of CUDA processes, GPUs what they are dealt out to.
	Procs int `json:"procs"`
	GPUs  int `json:"gpus"`
	// Shm is what is in the container's /dev/shm, in bytes: without CUDA only.
	Shm uint64 `json:"shmBytes,omitempty"`
	// Host is the program's host memory, in bytes, and Pinned whether it is page-locked by the driver.
	Host   uint64 `json:"hostBytes,omitempty"`
	Pinned bool   `json:"pinned,omitempty"`
	Media  string `json:"media"`
	Mode   string `json:"mode"`
}

// bytes is the GPU memory of all processes.
func (s shape) bytes() uint64 { return s.Size * uint64(s.Procs) }

// String names the shape for people.
func (s shape) String() string {
	if s.Content == contentNone && s.Shm > 0 {
		return fmt.Sprintf("no CUDA, %s in /dev/shm, %s, %s", formatSize(s.Shm), s.Media, s.Mode)
	}
	if s.Content == contentNone && s.Host > 0 {
		return fmt.Sprintf("no CUDA, %s of host memory, %s, %s", formatSize(s.Host), s.Media, s.Mode)
	}
	if s.Content == contentNone {
		return fmt.Sprintf("no CUDA, %s, %s", s.Media, s.Mode)
	}
	text := formatSize(s.Size)
	if s.Procs > 1 {
		text = fmt.Sprintf("%d × %s on %d GPU", s.Procs, text, s.GPUs)
		if s.GPUs > 1 {
			text += "s"
		}
	}
	if s.Host > 0 {
		kind := "host memory"
		if s.Pinned {
			kind = "pinned host memory"
		}
		text += fmt.Sprintf(" and %s of %s", formatSize(s.Host), kind)
	}
	return fmt.Sprintf("%s, %s, %s, %s", text, s.Content, s.Media, s.Mode)
}

// planned is a shape and the methods it is measured with, in turns.
type planned struct {
	shape
	methods []string
}

// selection is what the command line asks for.
type selection struct {
	methods, contents, media, modes []string
	sizes                           []uint64
	procs                           []int
	// procsSizes are the sizes for cases of more than one process.
	procsSizes []uint64
	// gpus is how many GPUs processes are dealt out to, at most.
	gpus int
	// plain adds a container without CUDA, shm one with so many bytes in /dev/shm, and host one with
	// so many bytes of host memory; 0 for none.
	plain bool
	shm   uint64
	host  uint64
	// beside adds each case of one process again, with so many bytes of host memory beside its GPU
	// memory, and pinned has that page-locked.
	beside uint64
	pinned bool
}

// plan lists the cases in the order in which they are measured.
func (s selection) plan() []planned {
	var all []planned
	add := func(sh shape) {
		p := planned{shape: sh}
		for _, m := range s.methods {
			if m == criugpu && sh.Content == contentNone {
				continue // its plugin has nothing to do, and there is no container
			}
			if m == byCRIU && sh.Host == 0 {
				continue // it is ours
			}
			p.methods = append(p.methods, m)
		}
		if len(p.methods) > 0 {
			all = append(all, p)
		}
	}
	for _, media := range s.media {
		for _, mode := range s.modes {
			if s.plain {
				add(shape{Content: contentNone, Media: media, Mode: mode, Procs: 1})
			}
			if s.shm > 0 {
				add(shape{Content: contentNone, Shm: s.shm, Media: media, Mode: mode, Procs: 1})
			}
			if s.host > 0 {
				add(shape{Content: contentNone, Host: s.host, Media: media, Mode: mode, Procs: 1})
			}
			for _, procs := range s.procs {
				sizes := s.sizes
				if procs > 1 {
					sizes = s.procsSizes
				}
				for _, size := range sizes {
					for _, content := range s.contents {
						sh := shape{Content: content, Size: size, Procs: procs, GPUs: min(procs, s.gpus), Media: media, Mode: mode}
						add(sh)
						if procs == 1 && s.beside > 0 {
							sh.Host, sh.Pinned = s.beside, s.pinned
							add(sh)
						}
					}
				}
			}
		}
	}
	return all
}

// oneOf reads a list of words, each of which must be known.
func oneOf(flag, list string, known ...string) ([]string, error) {
	var words []string
	for word := range strings.SplitSeq(list, ",") {
		if !slices.Contains(known, word) {
			return nil, fmt.Errorf("--%s: %q is none of %s", flag, word, strings.Join(known, ", "))
		}
		if !slices.Contains(words, word) {
			words = append(words, word)
		}
	}
	return words, nil
}

// suffixes are those of sizes.
var suffixes = []struct {
	name  string
	bytes uint64
}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}}

// parseSize reads "16GiB", "64M" or a number of bytes.
func parseSize(text string) (uint64, error) {
	n, err := units.RAMInBytes(text)
	if err != nil || n < 0 || n > 1<<60 {
		return 0, fmt.Errorf("%q is not a size such as 16GiB or 64MiB", text)
	}
	return uint64(n), nil
}

// noSizes is a list of sizes without any.
const noSizes = "none"

// parseSizes reads a list of sizes above zero.
func parseSizes(flag, list string) ([]uint64, error) {
	var sizes []uint64
	for text := range strings.SplitSeq(list, ",") {
		n, err := parseSize(text)
		if err != nil {
			return nil, fmt.Errorf("--%s: %w", flag, err)
		}
		if n == 0 {
			return nil, fmt.Errorf("--%s: %q is nothing to measure", flag, text)
		}
		sizes = append(sizes, n)
	}
	return sizes, nil
}

// parseCounts reads a list of numbers from 1 to 64.
func parseCounts(flag, list string) ([]int, error) {
	var counts []int
	for text := range strings.SplitSeq(list, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > 64 {
			return nil, fmt.Errorf("--%s: %q is no number from 1 to 64", flag, text)
		}
		counts = append(counts, n)
	}
	return counts, nil
}

// formatSize is parseSize's inverse for whole units, and rounds others.
func formatSize(bytes uint64) string {
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
