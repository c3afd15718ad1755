// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"strings"
	"testing"
)

// Mounts have names that a container chooses.
func FuzzParse(f *testing.F) {
	f.Add("36 35 98:0 /a\\040b /mnt\\012x rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n")
	f.Add("1 2 3 4 5 6 - 7 8 9")
	f.Fuzz(func(t *testing.T, mountinfo string) {
		mounts, err := parseMounts(strings.NewReader(mountinfo))
		if err == nil && len(mounts) != len(strings.Split(strings.TrimSuffix(mountinfo, "\n"), "\n")) && mountinfo != "" {
			t.Errorf("%d mounts in %q", len(mounts), mountinfo)
		}
		for _, m := range mounts {
			if m.point == "" || m.root == "" || m.kind == "" && !strings.Contains(mountinfo, " -  ") {
				t.Errorf("%q has the mount %+v", mountinfo, m)
			}
		}
	})
}
