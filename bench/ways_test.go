// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

// A way has what its bytes take and half a second, by medians of verified runs; without a limit the
// registry's own rate counts.
func TestWayTable(t *testing.T) {
	of := func(way string, rate uint64, running float64, verified bool) wayRun {
		return wayRun{imageOutcome: imageOutcome{Size: 1 << 30, Verified: verified}, Way: way, Rate: rate, Running: running, Fetched: 1e9, Alone: 2e9}
	}
	runs := []wayRun{
		of(wayRestore, 100e6, 11.4, true), of(wayRestore, 100e6, 11.6, true), of(wayRestore, 100e6, 99, false),
		of(wayPod, 100e6, 11.6, true),
		of(wayCtr, 0, 1.04, true), // at most 1.05 s
	}
	table := wayTable(runs)
	text := table.String()
	for _, want := range []string{"kept, 11.50 s", "missed, 11.50 s", "kept, 1.05 s"} {
		if strings.Count(text, want) != 1 {
			t.Errorf("it is not once %q:\n%s", want, text)
		}
	}
	r := &results{WayRuns: runs}
	if failed := r.firstFailed(); failed != "image of 1 GiB from a registry of 100 MB/s, gpuckpt restore --pull, round 0" {
		t.Errorf("failed: %q", failed)
	}
}
