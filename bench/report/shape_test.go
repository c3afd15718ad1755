// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"testing"
)

func TestFormatSize(t *testing.T) {
	for bytes, want := range map[uint64]string{16 << 30: "16 GiB", 64 << 20: "64 MiB", 3 << 29: "1.50 GiB", 12: "12 B", 0: "0 B"} {
		if got := FormatSize(bytes); got != want {
			t.Errorf("formatSize(%d) is %q, want %q", bytes, got, want)
		}
	}
}
