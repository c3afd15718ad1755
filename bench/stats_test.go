// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"math"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/images"
)

func TestSpread(t *testing.T) {
	for _, test := range []struct {
		values []float64
		want   spread
	}{
		{nil, spread{}},
		{[]float64{3}, spread{1, 3, 3, 3}},
		{[]float64{4, 1, 2}, spread{3, 2, 1, 4}},
		{[]float64{4, 1, 2, 9}, spread{4, 3, 1, 9}},
	} {
		if got := spreadOf(test.values); got != test.want {
			t.Errorf("spread of %v is %+v, want %+v", test.values, got, test.want)
		}
	}
	values := []float64{2, 1}
	spreadOf(values)
	if values[0] != 2 {
		t.Error("the values were reordered")
	}
}

func TestFitCost(t *testing.T) {
	want := cost{Container: 0.2, PerMiB: 0.001, PerProcess: 0.05}
	var points []point
	for _, mib := range []float64{16, 64, 256} {
		for _, procs := range []int{1, 2, 4} {
			points = append(points, point{mib, procs, want.Container + want.PerMiB*mib + want.PerProcess*float64(procs-1)})
		}
	}
	got, err := fitCost(points)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []float64{got.Container - want.Container, got.PerMiB - want.PerMiB, got.PerProcess - want.PerProcess} {
		if math.Abs(d) > 1e-9 {
			t.Fatalf("cost %+v, want %+v", got, want)
		}
	}
	for _, few := range [][]point{nil, points[:2], {points[0], points[0], points[3], points[3]}} {
		if got, err := fitCost(few); !errors.Is(err, errFit) {
			t.Errorf("%v were enough: %+v, error %v", few, got, err)
		}
	}
}

// phase makes one of milliseconds.
func phase(name string, start, took int) images.Phase {
	return images.Phase{Name: name, Start: time.Duration(start) * time.Millisecond, Took: time.Duration(took) * time.Millisecond}
}

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
