// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/internal/ptrace"
	"github.com/gpuckpt/gpuckpt/internal/staging"
)

func TestGapIn(t *testing.T) {
	const maps = `55f000000000-55f000200000 r-xp 00000000 08:01 1 /usr/bin/program
55f000400000-55f000500000 rw-p 00000000 00:00 0 [heap]
7f0000000000-7f0000001000 rw-p 00000000 00:00 0
7f0040001000-7f0040002000 rw-p 00000000 00:00 0
7f0040205000-7f0040300000 r-xp 00000000 08:01 2 /usr/lib/libc.so.6
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0 [stack]
7ffd001f0000-7ffd001f2000 r-xp 00000000 00:00 0 [vdso]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]
`
	for name, c := range map[string]struct {
		maps   string
		length uint64
		want   uint64
	}{
		"in the highest gap that has room": {maps, 1 << 20, 0x7f003fe00000},
		"not a whole number of pages":      {maps, 1<<20 - 100, 0x7f003fe00000},
		"a gigabyte and a bit":             {maps, 0x40001000, 0x7effbfe00000},
		"more than there is":               {maps, 1 << 47, 0},
		"nothing mapped":                   {"", 1 << 20, 0},
		"no map at all":                    {"what is this", 1 << 20, 0},
		"the first mapping has no gap":     {"7f0000000000-7f0000001000 rw-p 00000000 00:00 0\n", 1 << 20, 0},
	} {
		if got := gapIn(c.maps, c.length); got != c.want {
			t.Errorf("%s: got %#x, want %#x", name, got, c.want)
		}
	}
}

// FuzzGapIn looks for a place that is not free, or not aligned.
func FuzzGapIn(f *testing.F) {
	f.Add("1000-2000 rw-p\n7f0000000000-7f0000001000 rw-p\n", uint64(1<<20))
	f.Fuzz(func(t *testing.T, maps string, length uint64) {
		at := gapIn(maps, length)
		if at%staging.HugePage != 0 {
			t.Errorf("%#x is not aligned", at)
		}
		if at == 0 || length > 1<<47 {
			return
		}
		for line := range strings.Lines(maps) {
			if start, end, ok := ptrace.Addresses(line); ok && start < at+length && end > at {
				t.Errorf("%d bytes at %#x are on %s", length, at, line)
			}
		}
	})
}
