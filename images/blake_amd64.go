// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import "golang.org/x/sys/cpu"

// wide reports whether compress16 runs on this processor.
var wide = cpu.X86.HasAVX512F

// compress16 compresses 16 inputs at once, each as a chain of blocks of 64 bytes that begins with
// BLAKE3's own key. Input i begins at in+i*stride, and out[i] becomes its chaining value. counters
// has the low and the high word of each input's counter, flags has the flags of each block. out may
// be at in if there is one block. Meanwhile compress16 fetches what follows the inputs into the
// processor's cache, since memory is mostly read in order. Nothing need be there.
//
//go:noescape
func compress16(out *[16][8]uint32, in *byte, stride, blocks uint64, counters *[2][16]uint32, flags *[16]uint32)
