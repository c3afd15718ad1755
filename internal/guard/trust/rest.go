// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trust

import (
	"context"
	"fmt"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/sign"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// Rest compares the images of the processes' memory beside what containerd, runc and CRIU do: they
// are most of the bytes beside GPU state, and nobody parses them. Whoever admits a checkpoint with
// it calls
//
//  1. Need, before CRIU gets bytes of theirs,
//  2. Wait, before a thread of the restored processes runs, and before one has bytes of a file that is in pieces,
//  3. Close, in any case.
//
// The end of ctx ends what is compared.
//
// A checkpoint that is admitted without (nil) is compared whole. The zero Rest has nothing to compare.
type Rest struct {
	// Mounted says that the checkpoint's directory is mounted for a moment: what is in it is compared at once.
	Mounted bool

	later *sign.Later
}

// takes reports whether a file is compared later: an image of memory that has at least a block.
func (r *Rest) takes(f images.File) bool {
	return r != nil && images.IsMemory(f.Name) && (f.Pieces != nil || f.Bytes >= images.BlockBytes && !r.Mounted)
}

// begin begins to compare. It calls right when all is right.
func (r *Rest) begin(later *sign.Later, right func()) {
	back := host.AllProcessors()
	r.later = later
	later.Begin(func(err error) {
		back()
		if err == nil {
			right()
		}
	})
}

// Need returns when the parts of each image that somebody else gets are compared: those that parts
// returns, or the whole of an image of which it knows none. The error is seal.ErrChanged, or that of
// reading.
func (r *Rest) Need(ctx context.Context, parts func(name string) (_ []image.Part, some bool)) error {
	defer host.AllProcessors()()
	for _, name := range r.later.Names() {
		ranges, some := parts(name)
		if !some {
			ranges = []image.Part{{Bytes: ^uint64(0)}}
		}
		for _, p := range ranges {
			if err := r.later.Need(ctx, name, p.Offset, p.Offset+p.Bytes); err != nil {
				return fmt.Errorf("compare the memory that CRIU restores: %w", err)
			}
		}
	}
	return nil
}

// Wait returns when all is compared. The error is that of Need.
func (r *Rest) Wait(ctx context.Context) error { return r.later.Wait(ctx) }

// Close ends the comparison. It can be called again.
func (r *Rest) Close() { r.later.Close() }
