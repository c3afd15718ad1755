// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"os"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// mappings parses a memory map.
func mappings(t *testing.T, text string) []proc.Mapping {
	t.Helper()
	maps, err := proc.ParseMaps(strings.NewReader(text), proc.AllMappings)
	if err != nil {
		t.Fatal(err)
	}
	return maps
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
	maps, err := proc.Maps(os.Getpid(), proc.AllMappings)
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
