// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"strings"
	"testing"
)

// A way has what its bytes take and half a second, by medians of verified runs; without a limit the
// registry's own rate counts.
func TestWayTable(t *testing.T) {
	of := func(way string, rate uint64, running float64, verified bool) WayRun {
		return WayRun{ImageOutcome: ImageOutcome{Size: 1 << 30, Verified: verified}, Way: way, Rate: rate, Running: running, Fetched: 1e9, Alone: 2e9}
	}
	runs := []WayRun{
		of(WayRestore, 100e6, 11.4, true), of(WayRestore, 100e6, 11.6, true), of(WayRestore, 100e6, 99, false),
		of(WayPod, 100e6, 11.6, true),
		of(WayCtr, 0, 1.04, true), // at most 1.05 s
	}
	table := wayTable(runs)
	text := table.String()
	for _, want := range []string{"kept, 11.50 s", "missed, 11.50 s", "kept, 1.05 s"} {
		if strings.Count(text, want) != 1 {
			t.Errorf("it is not once %q:\n%s", want, text)
		}
	}
	r := &Results{WayRuns: runs}
	if failed := r.FirstFailed(); failed != "image of 1 GiB from a registry of 100 MB/s, gpuckpt restore --pull, round 0" {
		t.Errorf("failed: %q", failed)
	}
}
