// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"slices"
	"testing"

	"github.com/gpuckpt/gpuckpt/images"
)

// What is zero is not mapped, from whichever pieces the rest comes.
func TestNotZero(t *testing.T) {
	const offset, block = 0x3000, images.BlockBytes
	a := images.Area{Offset: offset, Bytes: 4*block + 0x5000}
	for _, c := range "0110d" { // zero, data, and data that is less than a block
		digest := images.ZeroBlockDigest
		if c != '0' {
			digest = "xxh3-128:0123456789abcdef0123456789abcdef"
		}
		a.Digests = append(a.Digests, digest)
	}
	end := offset + a.Bytes
	for _, test := range []struct {
		name     string
		from, to uint64
		want     []span
	}{
		{"all", offset, end, []span{{offset + block, offset + 3*block}, {offset + 4*block, end}}},
		{"a piece in a zero block", offset, offset + block/2, nil},
		{"a piece that ends in data", offset, offset + block + 0x1000, []span{{offset + block, offset + block + 0x1000}}},
		{"a piece of data", offset + 2*block, offset + 2*block + 0x1000, []span{{offset + 2*block, offset + 2*block + 0x1000}}},
	} {
		if got := notZero(a, test.from, test.to); !slices.Equal(got, test.want) {
			t.Errorf("%s: got %v, want %v", test.name, got, test.want)
		}
	}
}
