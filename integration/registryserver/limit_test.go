// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registryserver

import (
	"testing"
	"time"
)

// Bytes wait for those before them, and no longer; of the time without any, all but maxBehind is lost.
func TestLimiter(t *testing.T) {
	var l limiter
	now := time.Unix(1, 0)
	for _, step := range []struct {
		after time.Duration
		bytes int
		wait  time.Duration
	}{
		{0, 50, 0}, {0, 50, 500*time.Millisecond - maxBehind}, {time.Second, 100, 0}, {time.Minute, 1, 0}, {0, 3, 0},
		{0, 1, 40*time.Millisecond - maxBehind}, {25 * time.Millisecond, 1, 5 * time.Millisecond},
	} {
		if l.rate == 0 {
			l.set(100)
		}
		now = now.Add(step.after)
		if got := l.take(step.bytes, now); got != step.wait {
			t.Errorf("%d bytes wait for %v, want %v", step.bytes, got, step.wait)
		}
	}
	if got := l.count(); got != 206 {
		t.Errorf("%d bytes were sent", got)
	}
	l.set(0)
	if got := l.take(1<<30, now); got != 0 {
		t.Errorf("without a limit: %v", got)
	}
}
