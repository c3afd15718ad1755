// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"strings"
	"testing"
)

func TestMapsThatTheKernelNeverWrites(t *testing.T) {
	for name, s := range map[string]string{
		"words":          "no maps here\n",
		"no range":       "7f0000000000 rw-p 00000000 00:00 0 \n",
		"empty range":    "7f0000000000-7f0000000000 rw-p 00000000 00:00 0 \n",
		"backwards":      "7f0000001000-7f0000000000 rw-p 00000000 00:00 0 \n",
		"not hex":        "7g0000001000-7h0000000000 rw-p 00000000 00:00 0 \n",
		"bad inode":      "7f0000000000-7f0000001000 rw-p 00000000 00:00 x \n",
		"bad permission": "7f0000000000-7f0000001000 rw 00000000 00:00 0 \n",
		"cut off":        "7f0000000000-7f0000001000 rw-p\n",
		"not ascending": "7f0000002000-7f0000003000 rw-p 00000000 00:00 0 \n" +
			"7f0000000000-7f0000001000 rw-p 00000000 00:00 0 \n",
	} {
		if areas, err := ParseMaps(strings.NewReader(s), AllMappings); err == nil {
			t.Errorf("%s: accepted as %+v", name, areas)
		}
	}
}
