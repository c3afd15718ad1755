// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"math"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/images"
)

func TestCovered(t *testing.T) {
	for _, test := range []struct {
		name   string
		phases []images.Phase
		want   float64
	}{
		{"none", nil, 0},
		{"all", []images.Phase{phase("a", 0, 40), phase("b", 40, 60)}, 1},
		{"a gap", []images.Phase{phase("a", 0, 40), phase("b", 60, 20)}, 0.6},
		{"overlap", []images.Phase{phase("a", 0, 50), phase("b", 25, 50)}, 0.75},
		{"one in another", []images.Phase{phase("a", 0, 80), phase("b", 10, 20)}, 0.8},
		{"out of order", []images.Phase{phase("b", 50, 50), phase("a", 0, 50)}, 1},
		{"the lock of a pause before", []images.Phase{phase("lock", 0, 90), phase("a", 0, 10)}, 0.1},
	} {
		if got := covered(test.phases, 0.1); math.Abs(got-test.want) > 1e-9 {
			t.Errorf("%s: %v covered, want %v", test.name, got, test.want)
		}
	}
}

func TestDriverSeconds(t *testing.T) {
	steps := []images.Phase{phase("pause", 0, 5), phase("save GPU state", 5, 100)}
	if got := driverSeconds(steps); got != 0.1 {
		t.Errorf("driver %v s by the shim's step, want 0.1", got)
	}
	if got := driverSeconds(append(steps, phase("driver checkpoint", 10, 80))); got != 0.08 {
		t.Errorf("driver %v s by name, want 0.08", got)
	}
}

// phase is one of ms milliseconds, at milliseconds after the begin.
func phase(name string, at, ms int64) images.Phase {
	return images.Phase{Name: name, Start: time.Duration(at) * time.Millisecond, Took: time.Duration(ms) * time.Millisecond}
}
