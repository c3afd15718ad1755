// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"os"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/internal/proc"
	"github.com/gpuckpt/gpuckpt/internal/staging"
)

// mappings parses a memory map.
func mappings(t *testing.T, text string) []proc.Mapping {
	t.Helper()
	maps, err := proc.ParseMaps(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return maps
}

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
		"the first mapping has no gap":     {"7f0000000000-7f0000001000 rw-p 00000000 00:00 0\n", 1 << 20, 0},
	} {
		if got := gapIn(mappings(t, c.maps), c.length); got != c.want {
			t.Errorf("%s: got %#x, want %#x", name, got, c.want)
		}
	}
}

// FuzzGapIn looks for a place that is not free, or not aligned.
func FuzzGapIn(f *testing.F) {
	f.Add("1000-2000 rw-p 00000000 00:00 0 \n7f0000000000-7f0000001000 rw-p 00000000 00:00 0 \n", uint64(1<<20))
	f.Fuzz(func(t *testing.T, maps string, length uint64) {
		parsed, err := proc.ParseMaps(strings.NewReader(maps))
		if err != nil {
			return
		}
		at := gapIn(parsed, length)
		if at%staging.HugePage != 0 {
			t.Errorf("%#x is not aligned", at)
		}
		if at == 0 || length > 1<<47 {
			return
		}
		for _, m := range parsed {
			if m.Start < at+length && m.End > at {
				t.Errorf("%d bytes at %#x are on %+v", length, at, m)
			}
		}
	})
}

// The page of code is put where the driver has no business.
func TestLonelyPlace(t *testing.T) {
	const program = `00400000-00500000 r-xp 00000000 fe:00 1 /bin/job
01000000-02000000 rw-p 00000000 00:00 0 [heap]
200000000-200200000 rw-s 00000000 00:05 2 /dev/nvidiactl
7f0000000000-7f0000010000 rw-p 00000000 00:00 0
7f0000012000-7f0000020000 r-xp 00000000 fe:00 3 /lib/libcuda.so.1
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0 [stack]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]
`
	if at := lonelyPlace(mappings(t, program)); at < 0x300000000000 || at > 0x500000000000 || at%staging.HugePage != 0 {
		t.Errorf("got %#x", at)
	}
	for _, maps := range []string{"", "00400000-00500000 r-xp 00000000 fe:00 1 /bin/job\n"} {
		if at := lonelyPlace(mappings(t, maps)); at != 0 {
			t.Errorf("%q: got %#x", maps, at)
		}
	}
	// Of this process, and free.
	maps, err := proc.Maps(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	at := lonelyPlace(maps)
	for _, m := range maps {
		if at+copierBytes > m.Start && at < m.End {
			t.Errorf("%#x is in %+v", at, m)
		}
	}
}
