// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"os"
	"strings"

	"github.com/gpuckpt/gpuckpt/internal/ptrace"
	"github.com/gpuckpt/gpuckpt/internal/staging"
)

// alignedGap returns an address for a mapping of that many bytes, at the begin of
// a huge page of the process, 0 if there is none. It is in the gap that the
// kernel would choose, the highest one below a mapping that holds it.
//
// Left alone, the kernel puts a staging area right below another mapping, at any
// page. Where in its file the area begins follows from that (staging.File.Offset), so
// of two checkpoints of the same memory no layer of a checkpoint image would be
// the same: each is cut at the file's offsets.
func alignedGap(pid int, length uint64) (uint64, error) {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return 0, fmt.Errorf("read the memory map of process %d: %w", pid, err)
	}
	return gapIn(string(maps), length), nil
}

// gapIn finds the place in what /proc/PID/maps says; 0 if that is not in order.
func gapIn(maps string, length uint64) (at uint64) {
	length = pages(length)
	below := uint64(0) // the end of the mapping before
	for line := range strings.Lines(maps) {
		start, end, ok := ptrace.Addresses(line)
		if !ok || start < below || end < start {
			return 0
		}
		// The stack grows into the gap below it. The kernel's own mappings are
		// near it, where it would put none of the program's.
		kernels := strings.Contains(line, "[") && !strings.Contains(line, "[heap]")
		if top := start &^ (staging.HugePage - 1); !kernels && below > 0 && top >= length {
			if place := (top - length) &^ (staging.HugePage - 1); place >= below {
				at = place
			}
		}
		below = end
	}
	return at
}
