// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import "testing"

func TestParseVersion(t *testing.T) {
	for _, c := range []struct{ file, want string }{
		{"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build  (dvs-builder@U22)  Tue Apr  1 00:00:00 UTC 2026\nGCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n", "580.159.03"},
		{"NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version:\n", "535.104.05"},
		{"NVRM version: NVIDIA UNIX aarch64 Kernel Module  570.86  Release\n", "570.86"},
		{"GCC version:  gcc version 112.3.0\n", ""},
		{"", ""},
	} {
		if got := parseVersion(c.file); got != c.want {
			t.Errorf("%q: got %q, want %q", c.file, got, c.want)
		}
	}
}

func TestTooOld(t *testing.T) {
	for version, want := range map[string]bool{
		"535.104.05": true, "565.57.01": true, "570.86.10": false, "580.0-softcuda": false, "1000.1": false,
		"": false, "unknown": false,
	} {
		if tooOld(version) != want {
			t.Errorf("%q: %v", version, !want)
		}
	}
}
