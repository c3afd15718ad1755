// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/gpu/ptrace"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// placed reports whether the place of a staging area, as the driver asked for it, is chosen here.
func placed(asked *unix.PtraceRegs) bool { return asked.Rdi == 0 && asked.Rsi < 1<<46 }

// trim returns where an area of length bytes is placed: at the last huge page that begins in a new
// mapping which is a huge page longer and begins at start. The thread's call returns that place, then
// the rest is unmapped. After an error some of the rest is still mapped, without memory.
//
// Left alone, the kernel puts a staging area right below another mapping, at any page. The area's
// address decides its offset in its file (staging.File.Offset), and the layers of a checkpoint
// image are cut at the file's offsets. So two checkpoints would have no layer in common. Asked for
// an address that was free a moment ago, the kernel finds it taken where another thread maps memory.
func trim(t *ptrace.Thread, start, length uint64) (uint64, error) {
	end := start + length + staging.HugePage
	at := (start + staging.HugePage) &^ (staging.HugePage - 1)
	r, err := t.Registers()
	if err != nil {
		return 0, err
	}
	r.Rax = at // before anything is unmapped: this process may die at any step
	if err := t.SetRegisters(&r); err != nil {
		return 0, err
	}
	for _, rest := range [][2]uint64{{start, at}, {at + length, end}} {
		if rest[0] == rest[1] {
			continue
		}
		if _, err := t.Syscall(unix.SYS_MUNMAP, rest[0], rest[1]-rest[0]); err != nil {
			return 0, fmt.Errorf("trim the area: %w", err)
		}
	}
	return at, nil
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
