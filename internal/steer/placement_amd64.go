// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"strings"

	"github.com/gpuckpt/gpuckpt/internal/proc"
	"github.com/gpuckpt/gpuckpt/internal/staging"
)

// alignedGap returns an address for a mapping of that many bytes, at the begin of a huge page of
// the process, 0 if there is none. It is in the gap that the kernel would choose, the highest one
// below a mapping that holds it.
//
// Left alone, the kernel puts a staging area right below another mapping, at any page. The area's
// address decides its offset in its file (staging.File.Offset), and the layers of a checkpoint
// image are cut at the file's offsets. So two checkpoints would have no layer in common.
func alignedGap(pid int, length uint64) (uint64, error) {
	maps, err := proc.Maps(pid)
	return gapIn(maps, length), err
}

// gapIn finds the place in a memory map.
func gapIn(maps []proc.Mapping, length uint64) (at uint64) {
	length = pages(length)
	below := uint64(0) // the end of the mapping before
	for _, m := range maps {
		// The stack grows into the gap below it. The kernel's own mappings are
		// near it, where it would put none of the program's.
		kernels := strings.HasPrefix(m.Path, "[") && m.Path != "[heap]"
		if top := m.Start &^ (staging.HugePage - 1); !kernels && below > 0 && top >= length {
			if place := (top - length) &^ (staging.HugePage - 1); place >= below {
				at = place
			}
		}
		below = m.End
	}
	return at
}

// lonelyPlace returns an address for a mapping that is far from all others: in the middle of the
// largest gap between two. Left alone, the kernel puts a mapping into the first hole that is large
// enough, which the driver may have made, and may fill or unmap again with what is around.
func lonelyPlace(maps []proc.Mapping) (at uint64) {
	below, largest := uint64(0), uint64(0)
	for _, m := range maps {
		if m.Start >= 1<<47 { // the kernel's, above
			break
		}
		if gap := m.Start - below; below > 0 && gap > largest {
			largest, at = gap, (below+gap/2)&^(staging.HugePage-1)
		}
		below = m.End
	}
	return at
}
