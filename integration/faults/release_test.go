// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"bytes"
	"os"
	"testing"
)

// A release has no points: nothing of a program that was built without the tag asks anybody. What
// is built with it does, so the test would find it.
func TestReleaseHasNoPoints(t *testing.T) {
	for _, program := range []string{"containerd-shim-gpuckpt-v2", "gpuckpt"} {
		for dir, want := range map[string]bool{"": false, "faults/": true} {
			path, err := session.Bins.Path(dir + program)
			if err != nil {
				t.Fatal(err)
			}
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if has := bytes.Contains(data, []byte("GPUCKPT_FAULTS")); has != want {
				t.Errorf("%s has points: %t, want %t", path, has, want)
			}
		}
	}
}
