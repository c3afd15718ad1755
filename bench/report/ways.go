// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"slices"
)

// WayRun is one checkpoint image that comes from a registry of a limited rate and runs, in one of the
// ways that a node can do it. Times are the client's, in seconds.
type WayRun struct {
	ImageOutcome
	Way string `json:"way"`
	// Rate is in bytes a second; 0 is no limit.
	Rate uint64 `json:"bytesPerSecond"`
	// Running is from the client's command, or the pod's manifest, until the program answers.
	Running float64 `json:"runningSeconds"`
	// Fetched are the bytes of blobs that the registry had sent by then.
	Fetched uint64 `json:"fetchedBytes"`
	// Alone is the registry's own rate, as registryRun's.
	Alone float64 `json:"aloneBytesPerSecond"`
}

// The ways, in the order in which they take turns.
const (
	WayRestore = "gpuckpt restore --pull"
	WayCtr     = "ctr pull, ctr run"
	WayPod     = "a pod"
)

// Name returns the name of the run in logs and tables.
func (r WayRun) Name() string {
	return fmt.Sprintf("image of %s from a registry of %s, %s, round %d", FormatSize(r.Size), RateText(r.Rate), r.Way, r.Round)
}

// Limit is what the run may take, in seconds, and alone what its bytes take.
func (r WayRun) Limit() (alone, limit float64) {
	rate := r.Alone
	if r.Rate > 0 && (rate == 0 || float64(r.Rate) < rate) {
		rate = float64(r.Rate)
	}
	if rate == 0 {
		return 0, 0
	}
	alone = float64(r.Fetched) / rate
	return alone, 1.1*alone + 0.5
}

// wayTable compares the ways with how long the bytes take, by medians.
func wayTable(runs []WayRun) table {
	t := table{columns: []string{"GPU memory", "the registry sends", "way", "runs", "fetched", "running", "the bytes alone", "at most 1.1 × that + 0.5 s"}}
	for _, size := range imageSizes(runs, func(r WayRun) ImageOutcome { return r.ImageOutcome }) {
		var rates []uint64
		for _, r := range runs {
			if r.shape() == size && !slices.Contains(rates, r.Rate) {
				rates = append(rates, r.Rate)
			}
		}
		for _, rate := range rates {
			for _, way := range []string{WayRestore, WayCtr, WayPod} {
				var running, fetched, alone, limit []float64
				for _, r := range runs {
					if r.Verified && r.shape() == size && r.Rate == rate && r.Way == way {
						a, l := r.Limit()
						running, fetched = append(running, r.Running), append(fetched, float64(r.Fetched))
						alone, limit = append(alone, a), append(limit, l)
					}
				}
				took, most := spreadOf(running), spreadOf(limit).Median
				if took.N == 0 {
					continue
				}
				verdict := "kept, "
				if took.Median > most {
					verdict = "missed, "
				}
				t.add(size.String(), RateText(rate), way, fmt.Sprint(took.N), RoundSize(spreadOf(fetched).Median), took.text(), Seconds(spreadOf(alone).Median), verdict+Seconds(most))
			}
		}
	}
	return t
}
