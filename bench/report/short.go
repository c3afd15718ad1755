// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"strings"
)

// ShortResult is what it costs to have too little memory for GPU state, with
// images on a disk.
type ShortResult struct {
	Size uint64 `json:"sizeBytes"`
	// Buffer is the shim's, in bytes.
	Buffer uint64     `json:"bufferBytes"`
	Pairs  []ShortRun `json:"runs"`
}

// ShortRun is one run each way, in turns.
type ShortRun struct {
	Usual   Run `json:"usual"`
	Through Run `json:"through"`
}

// shortText tells of GPU state that went through a buffer.
func (r *Results) shortText() string {
	s := r.Short
	if s == nil {
		return ""
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\n## Memory too short for GPU state\n\n%s of GPU memory to a disk: usually, and written through a buffer of %s. "+
		"Medians of verified runs; memory is the most that the cgroup for GPU state was charged with in a checkpoint.\n\n| | n | checkpoint | restore | memory |\n|---|---|---|---|---|\n",
		FormatSize(s.Size), FormatSize(s.Buffer))
	row := func(name string, of func(ShortRun) Run) {
		var checkpoints, restores []float64
		most := uint64(0)
		for _, p := range s.Pairs {
			if m := of(p); m.Verified {
				checkpoints, restores, most = append(checkpoints, m.Checkpoint.Seconds), append(restores, m.Restore.Seconds), max(most, m.Checkpoint.StagingPeak)
			}
		}
		fmt.Fprintf(&b, "| %s | %d | %s | %s | %s |\n", name, len(checkpoints),
			Seconds(spreadOf(checkpoints).Median), Seconds(spreadOf(restores).Median), RoundSize(float64(most)))
	}
	row("usual", func(p ShortRun) Run { return p.Usual })
	row("written through", func(p ShortRun) Run { return p.Through })
	return b.String()
}
