// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"strings"
	"testing"
)

// The table says whether a restore was in time.
func TestArrivalTable(t *testing.T) {
	run := RegistryRun{ImageOutcome: ImageOutcome{Size: 1 << 30, Verified: true}, Pull: 5, Resume: 2, Alone: 2e9, Arrivals: []ArrivalRun{
		{Rate: 100e6, Running: 11.4, Restore: 11.5, Fetched: 1e9}, {Rate: 1e9, Running: 1.7, Fetched: 1e9}, {Running: 1, Fetched: 1e9},
	}}
	var text []string
	for _, row := range arrivalTable([]RegistryRun{run}).rows {
		text = append(text, strings.Join(row, "|"))
	}
	all := strings.Join(text, "\n")
	for _, want := range []string{"100 MB/s", "kept, 11.5", "1000 MB/s", "missed, 1.6", "no limit", "kept, 1.05", "7.0"} {
		if !strings.Contains(all, want) {
			t.Errorf("%q is missing in\n%s", want, all)
		}
	}
}
