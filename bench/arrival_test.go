// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"testing"
)

func TestParseRates(t *testing.T) {
	if got, err := parseRates("100MB,1GB,0"); err != nil || !slices.Equal(got, []uint64{100e6, 1e9, 0}) {
		t.Errorf("%d, %v", got, err)
	}
	for _, text := range []string{"", "fast", "-1MB", "1GB,"} {
		if got, err := parseRates(text); err == nil {
			t.Errorf("%q is %d, want an error", text, got)
		}
	}
}
