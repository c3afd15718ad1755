// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"errors"
	"slices"

	"gonum.org/v1/gonum/mat"
)

// spread is a sample's middle and its bounds.
type spread struct {
	N      int     `json:"n"`
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// spreadOf gives the spread of values, the zero spread for none.
func spreadOf(values []float64) spread {
	if len(values) == 0 {
		return spread{}
	}
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	middle := sorted[n/2]
	if n%2 == 0 {
		middle = (sorted[n/2-1] + sorted[n/2]) / 2
	}
	return spread{N: n, Median: middle, Min: sorted[0], Max: sorted[n-1]}
}

// errFit says that the points do not determine a plane.
var errFit = errors.New("too few different points")

// cost is what a time is made of: seconds = Container + PerMiB·MiB +
// PerProcess·(processes − 1).
type cost struct {
	Container  float64 `json:"containerSeconds"`
	PerMiB     float64 `json:"secondsPerMiB"`
	PerProcess float64 `json:"secondsPerProcess"`
}

// point is one measurement for fitCost.
type point struct {
	mib     float64
	procs   int
	seconds float64
}

// fitCost finds the cost by least squares.
func fitCost(points []point) (cost, error) {
	if len(points) < 3 {
		return cost{}, errFit
	}
	a, y := mat.NewDense(len(points), 3, nil), mat.NewVecDense(len(points), nil)
	for i, p := range points {
		a.SetRow(i, []float64{1, p.mib, float64(p.procs - 1)})
		y.SetVec(i, p.seconds)
	}
	var qr mat.QR
	qr.Factorize(a)
	if qr.Cond() > 1e12 {
		return cost{}, errFit
	}
	var x mat.VecDense
	if err := qr.SolveVecTo(&x, false, y); err != nil {
		return cost{}, err
	}
	return cost{Container: x.AtVec(0), PerMiB: x.AtVec(1), PerProcess: x.AtVec(2)}, nil
}
