// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"context"
	"fmt"
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

// slowFile is an Arrival that notes what was waited for.
type slowFile struct {
	waited *[]string
	name   string
}

func (f slowFile) Await(_ context.Context, from, to uint64) error {
	*f.waited = append(*f.waited, fmt.Sprint(f.name, " ", from, " ", to))
	return nil
}

// A part of an area has its blocks' digests, and waits for its own files alone.
func TestPart(t *testing.T) {
	const offset = 4096
	var waited []string
	a := Area{Start: 1 << 40, Bytes: 2*BlockBytes + 4096, Offset: offset, Digests: []string{"a", "b", "c"}, Location: Location{
		{Path: "one", Bytes: offset + BlockBytes, Arrival: slowFile{&waited, "one"}},
		{Path: "two", Offset: offset + BlockBytes, Bytes: BlockBytes},
		{Path: "three", Offset: offset + 2*BlockBytes, Bytes: 4096, Arrival: slowFile{&waited, "three"}},
	}}
	for _, test := range []struct {
		at, bytes, blocks uint64
		files             []string
	}{
		{0, a.Bytes, 3, []string{"one 4096 67112960", "three 0 4096"}},
		{0, BlockBytes, 1, []string{"one 4096 67112960"}},
		{BlockBytes, BlockBytes, 1, nil},
		{BlockBytes, BlockBytes + 4096, 2, []string{"three 0 4096"}},
		{2 * BlockBytes, 4096, 1, []string{"three 0 4096"}},
	} {
		waited = nil
		p := a.Part(test.at, test.bytes)
		if err := p.Await(t.Context()); err != nil {
			t.Fatal(err)
		}
		first := test.at / BlockBytes
		if p.Start != a.Start+test.at || p.Offset != offset+test.at || p.End() != offset+test.at+test.bytes || !slices.Equal(p.Digests, a.Digests[first:first+test.blocks]) {
			t.Errorf("part %d of %d bytes: %+v", test.at, test.bytes, p)
		}
		if !slices.Equal(waited, test.files) {
			t.Errorf("part %d of %d bytes waits for %q", test.at, test.bytes, waited)
		}
	}
}
