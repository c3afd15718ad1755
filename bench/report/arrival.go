// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"slices"

	"github.com/gpuckpt/gpuckpt/images"
)

// ArrivalRun is "gpuckpt restore --pull" from a registry that sends so many bytes a second. Times
// are the client's, in seconds.
type ArrivalRun struct {
	// Rate is in bytes a second; 0 is no limit.
	Rate uint64 `json:"bytesPerSecond"`
	// Running is until the program answers, Restore until containerd has the image too, unpacked.
	Running float64 `json:"runningSeconds"`
	Restore float64 `json:"restoreSeconds"`
	// Fetched are the bytes of blobs that the registry has sent.
	Fetched uint64 `json:"fetchedBytes"`
	// Phases are the shim's, from its Start on.
	Phases []images.Phase `json:"phases,omitempty"`
	// Flow is how far the bytes were meanwhile.
	Flow []FlowPoint `json:"flow,omitempty"`
}

// RateText is a rate in bytes a second, as text; 0 is no limit.
func RateText(rate uint64) string {
	if rate == 0 {
		return "no limit"
	}
	return fmt.Sprintf("%d MB/s", rate/1e6)
}

// arrivalTable compares restores from a registry with a pull and a run, one after the other, from the
// same one without a limit, and with how long the bytes take.
func arrivalTable(runs []RegistryRun) table {
	t := table{columns: []string{"GPU memory", "the registry sends", "runs", "fetched", "running", "image kept", "the bytes alone", "at most 1.1 × that + 0.5 s", "pull, then ctr run"}}
	perRegistrySize(runs, func(size imageShape, of func(func(RegistryRun) float64) spread) {
		var rates []uint64
		for _, r := range runs {
			for _, a := range r.Arrivals {
				if !slices.Contains(rates, a.Rate) {
					rates = append(rates, a.Rate)
				}
			}
		}
		for _, rate := range rates {
			number := func(value func(RegistryRun, ArrivalRun) float64) spread {
				return of(func(r RegistryRun) float64 {
					at := slices.IndexFunc(r.Arrivals, func(a ArrivalRun) bool { return a.Rate == rate })
					if at < 0 {
						return 0
					}
					return value(r, r.Arrivals[at])
				})
			}
			running := number(func(_ RegistryRun, a ArrivalRun) float64 { return a.Running })
			kept := number(func(_ RegistryRun, a ArrivalRun) float64 { return a.Restore })
			fetched := number(func(_ RegistryRun, a ArrivalRun) float64 { return float64(a.Fetched) }).Median
			alone := number(func(r RegistryRun, a ArrivalRun) float64 { return r.alone(a) }).Median
			allowed, apart := "", ""
			if alone > 0 {
				last := 1.1*alone + 0.5
				allowed = "kept, " + Seconds(last)
				if running.Median > last {
					allowed = "missed, " + Seconds(last)
				}
			}
			if rate == 0 {
				apart = of(func(r RegistryRun) float64 { return r.Pull + r.Resume }).text()
			}
			t.add(size.String(), RateText(rate), fmt.Sprint(running.N), RoundSize(fetched), running.text(), kept.text(), Seconds(alone), allowed, apart)
		}
	})
	return t
}

// alone is how long the bytes of an arrival take: by the limit, or by what the registry itself can do.
func (r RegistryRun) alone(a ArrivalRun) float64 {
	rate := r.Alone
	if a.Rate > 0 && (rate == 0 || float64(a.Rate) < rate) {
		rate = float64(a.Rate)
	}
	if rate == 0 {
		return 0
	}
	return float64(a.Fetched) / rate
}
