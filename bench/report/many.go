// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"

	"github.com/gpuckpt/gpuckpt/images"
)

// ManyRun is containers of one checkpoint image that are restored at once, beside one alone. The
// image is unpacked before. Times are the client's, in seconds.
type ManyRun struct {
	ImageOutcome
	// Count containers are restored at once, on GPUs GPUs in turns.
	Count int `json:"count"`
	GPUs  int `json:"gpus"`
	// One is ctr starting one of them, All until the last of all runs.
	One float64 `json:"oneSeconds"`
	All float64 `json:"allSeconds"`
	// OneDriver and AllDriver are the longest of the driver's steps in these.
	OneDriver float64 `json:"oneDriverSeconds,omitempty"`
	AllDriver float64 `json:"allDriverSeconds,omitempty"`
	// OnePhases and AllPhases are the steps of the restores with these.
	OnePhases []images.Phase `json:"onePhases,omitempty"`
	AllPhases []images.Phase `json:"allPhases,omitempty"`
	// OneMemory and AllMemory are what that takes of the machine's memory. The software GPU's memory is
	// the machine's too.
	OneMemory MemoryPeak `json:"oneMemory"`
	AllMemory MemoryPeak `json:"allMemory"`
}

// Name is the run's for people.
func (r ManyRun) Name() string {
	return fmt.Sprintf("checkpoint image of %s, %d at once, round %d", FormatSize(r.Size), r.Count, r.Round)
}

// manyTable compares restores at once with one.
func manyTable(runs []ManyRun) table {
	t := table{columns: []string{"GPU memory", "at once", "GPUs", "one", "driver", "all", "driver", "", "at most 1.5 ×", "memory, one", "memory, all"}}
	for _, r := range runs {
		if !r.Verified {
			continue
		}
		kept := "kept"
		if r.All > 1.5*r.One {
			kept = "missed"
		}
		t.add(r.shape().String(), fmt.Sprint(r.Count), fmt.Sprint(r.GPUs), Seconds(r.One), Seconds(r.OneDriver), Seconds(r.All), Seconds(r.AllDriver), fmt.Sprintf("%.2f×", r.All/r.One), kept,
			RoundSize(float64(r.OneMemory.Used)), RoundSize(float64(r.AllMemory.Used)))
	}
	return t
}
