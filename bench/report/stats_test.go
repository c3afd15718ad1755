// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"errors"
	"math"
	"testing"
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
