// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"slices"
	"strings"
	"testing"
)

// Zeros are in no extent, from whichever pieces the rest comes.
func TestExtents(t *testing.T) {
	const start, offset, block = 1 << 40, 0x3000, BlockBytes
	a := Area{Start: start, Offset: offset, Bytes: 4*block + 0x5000}
	for _, c := range "0110d" { // zero, data, and data that is less than a block
		digest := ZeroBlockDigest
		if c != '0' {
			digest = "blake3:" + strings.Repeat("01", 32)
		}
		a.Digests = append(a.Digests, digest)
	}
	for _, test := range []struct {
		name     string
		location Location
		want     []Extent
	}{
		{"one file", a.In("f").Location, []Extent{
			{start + block, 2 * block, "f", offset + block}, {start + 4*block, 0x5000, "f", offset + 4*block},
		}},
		{"none", nil, nil},
		{"a piece of zeros", Location{{Path: "f", Bytes: offset + block/2}}, nil},
		{"a piece before the range", Location{{Path: "f", Bytes: offset}}, nil},
		{"a piece that ends in data", Location{{Path: "f", Bytes: offset + block + 0x1000}}, []Extent{{start + block, 0x1000, "f", offset + block}}},
		{"two pieces side by side", Location{{Path: "f", Offset: 2 * block, Bytes: block / 2}, {Path: "g", Offset: 5 * block / 2, Bytes: 0x1000}}, []Extent{
			{start + 2*block - offset, block / 2, "f", 0}, {start + 5*block/2 - offset, 0x1000, "g", 0},
		}},
	} {
		a.Location = test.location
		if got := a.Extents(); !slices.Equal(got, test.want) {
			t.Errorf("%s: got %+v, want %+v", test.name, got, test.want)
		}
	}
	a.Digests = nil
	if got, want := a.In("f"), []Extent{{start, a.Bytes, "f", offset}}; !slices.Equal(got.Extents(), want) {
		t.Errorf("without digests: got %+v, want %+v", got.Extents(), want)
	}
}
