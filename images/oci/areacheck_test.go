// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"fmt"
	"testing"

	"github.com/gpuckpt/gpuckpt/images"
)

// TestPartsKeepLittle goes through an area that is zero, of which an image of a few megabytes can have terabytes: each part has the
// end of a block that the part before began.
func TestPartsKeepLittle(t *testing.T) {
	const offset, blocks = 1 << 20, 4
	for _, wrong := range []int{-1, 0, blocks - 1} {
		area := images.Area{File: "gpu-1-0", Offset: offset, Bytes: blocks * images.BlockBytes}
		for i := range blocks {
			area.Digests = append(area.Digests, images.ZeroBlockDigest)
			if i == wrong {
				area.Digests[i] = images.DigestBlock(nil)
			}
		}
		v := new(verifier)
		c := newAreaCheck(v, area, minLayerBytes)
		for _, i := range []int{1, 0, 2, 4, 3} {
			c.parts[i].check(t.Context())
		}
		for i, p := range c.parts {
			if p.block != nil || p.head != nil {
				t.Errorf("part %d keeps %d bytes, and a block: %v", i, len(p.head), p.block != nil)
			}
		}
		if got, want := len(v.faults), min(wrong+1, 1); got != want {
			t.Errorf("block %d is wrong: %d faults, want %d: %s", wrong, got, want, fmt.Sprint(v.faults))
		}
	}
}
