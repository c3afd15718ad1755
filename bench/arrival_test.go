// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// Bytes wait for those before them, and no longer; time without any is lost.
func TestLimiter(t *testing.T) {
	var l limiter
	now := time.Unix(1, 0)
	for _, step := range []struct {
		after time.Duration
		bytes int
		wait  time.Duration
	}{
		{0, 50, 0}, {0, 50, 500 * time.Millisecond}, {time.Second, 100, 0}, {time.Minute, 1, 0},
	} {
		if step.bytes == 50 && l.rate == 0 {
			l.set(100)
		}
		now = now.Add(step.after)
		if got := l.take(step.bytes, now); got != step.wait {
			t.Errorf("%d bytes wait for %v, want %v", step.bytes, got, step.wait)
		}
	}
	if got := l.count(); got != 201 {
		t.Errorf("%d bytes were sent", got)
	}
	l.set(0)
	if got := l.take(1<<30, now); got != 0 {
		t.Errorf("without a limit: %v", got)
	}
}

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

// The table says whether a restore was in time.
func TestArrivalTable(t *testing.T) {
	run := registryRun{imageOutcome: imageOutcome{Size: 1 << 30, Verified: true}, Pull: 5, Resume: 2, Alone: 2e9, Arrivals: []arrivalRun{
		{Rate: 100e6, Running: 11.4, Restore: 11.5, Fetched: 1e9}, {Rate: 1e9, Running: 1.7, Fetched: 1e9}, {Running: 1, Fetched: 1e9},
	}}
	var text []string
	for _, row := range arrivalTable([]registryRun{run}).rows {
		text = append(text, strings.Join(row, "|"))
	}
	all := strings.Join(text, "\n")
	for _, want := range []string{"100 MB/s", "kept, 11.5", "1000 MB/s", "missed, 1.6", "no limit", "kept, 1.05", "7.0"} {
		if !strings.Contains(all, want) {
			t.Errorf("%q is missing in\n%s", want, all)
		}
	}
}
