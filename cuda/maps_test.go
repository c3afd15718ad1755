// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

const someMaps = `55e4d1a00000-55e4d1a01000 r--p 00000000 fe:01 1234                       /bin/x
55e4d2a00000-55e4d2a21000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0400000000 rw-p 00000000 00:00 0 
7f0400000000-7f0400001000 ---p 00000000 00:00 0 
7f0500000000-7f0500200000 rw-s 00000000 00:01 77                         /memfd:gpuckpt (deleted)
7f0600000000-7f0600200000 rw-p 00000000 00:05 78                         /dev/zero
7f0700000000-7f0700001000 rw-p 00000000 00:00 0                          [anon: pool]
7f0800000000-7f0800001000 rw-p 00000000 00:00 0
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0                          [stack]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
`

func TestOnlyUnnamedPrivateAnonymousRangesCount(t *testing.T) {
	mappings, err := proc.ParseMaps(strings.NewReader(someMaps), isAnonymous)
	if err != nil {
		t.Fatal(err)
	}
	got := ranges(mappings)
	want := []Range{{0x7f0000000000, 0x7f0400000000}, {0x7f0800000000, 0x7f0800001000}}
	if !slices.Equal(got, want) {
		t.Errorf("got %x, want %x", got, want)
	}
	if got[0].Bytes() != 16<<30 {
		t.Errorf("first area has %d bytes", got[0].Bytes())
	}
}

func TestNewRanges(t *testing.T) {
	for _, c := range []struct {
		name                string
		before, after, want []Range
	}{
		{"nothing new", []Range{{1, 5}}, []Range{{1, 5}}, nil},
		{"all new", nil, []Range{{1, 5}, {7, 9}}, []Range{{1, 5}, {7, 9}}},
		{"one beside", []Range{{1, 5}}, []Range{{1, 5}, {7, 9}}, []Range{{7, 9}}},
		{"joined with the area above", []Range{{5, 9}}, []Range{{1, 9}}, []Range{{1, 5}}},
		{"joined with the area below", []Range{{1, 5}}, []Range{{1, 9}}, []Range{{5, 9}}},
		{"joins two", []Range{{1, 3}, {6, 9}}, []Range{{1, 9}}, []Range{{3, 6}}},
		{"around one", []Range{{3, 6}}, []Range{{1, 9}}, []Range{{1, 3}, {6, 9}}},
		{"one is gone", []Range{{1, 3}, {6, 9}}, []Range{{6, 9}}, nil},
		{"one has shrunk", []Range{{1, 9}}, []Range{{2, 4}, {6, 8}}, nil},
	} {
		if got := NewRanges(c.before, c.after); !slices.Equal(got, c.want) {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}

func TestAnonymousRangesSeeANewMapping(t *testing.T) {
	before, err := AnonymousRanges(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	const size = 64 << 20
	m, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(m)
	after, err := AnonymousRanges(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	var bytes uint64
	for _, a := range NewRanges(before, after) {
		bytes += a.Bytes()
	}
	// The Go runtime may map some memory of its own in between.
	if bytes < size || bytes > size+32<<20 {
		t.Errorf("%d bytes are new, mapped %d", bytes, size)
	}
}

func FuzzParseMaps(f *testing.F) {
	f.Add(someMaps)
	f.Add("0-1 rw-p 0 0 0\n1-2 rw-p 0 0 0")
	f.Fuzz(func(t *testing.T, s string) {
		mappings, err := proc.ParseMaps(strings.NewReader(s), isAnonymous)
		if err != nil {
			return
		}
		areas := ranges(mappings)
		var last uint64
		for _, a := range areas {
			if a.Start >= a.End || a.Start < last {
				t.Fatalf("areas out of order: %x", areas)
			}
			last = a.End
		}
		if fresh := NewRanges(areas, areas); len(fresh) != 0 {
			t.Fatalf("%x are new against themselves: %x", areas, fresh)
		}
	})
}
