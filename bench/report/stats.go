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
	var rows [][]float64
	var seconds []float64
	for _, p := range points {
		rows, seconds = append(rows, []float64{1, p.mib, float64(p.procs - 1)}), append(seconds, p.seconds)
	}
	x, err := fit(rows, seconds)
	if err != nil {
		return cost{}, err
	}
	return cost{Container: x[0], PerMiB: x[1], PerProcess: x[2]}, nil
}

// fit finds the factors by which the columns of rows come nearest to values, by least squares. The error is
// errFit where they do not determine them.
func fit(rows [][]float64, values []float64) ([]float64, error) {
	if len(rows) == 0 || len(rows) < len(rows[0]) {
		return nil, errFit
	}
	a, y := mat.NewDense(len(rows), len(rows[0]), nil), mat.NewVecDense(len(rows), values)
	for i, row := range rows {
		a.SetRow(i, row)
	}
	var qr mat.QR
	qr.Factorize(a)
	if qr.Cond() > 1e12 {
		return nil, errFit
	}
	var x mat.VecDense
	if err := qr.SolveVecTo(&x, false, y); err != nil {
		return nil, err
	}
	return x.RawVector().Data, nil
}
