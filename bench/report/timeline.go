// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"time"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/cli/oplogcmd/timeline"
)

// timeline draws the phases of one run of ours, of the largest size charted:
// its median checkpoint and its median restore. nil when there is none.
func (r *Results) timeline() []byte {
	groups := r.charted()
	for len(groups) > 0 && len(groups[len(groups)-1].runs[Ours]) == 0 {
		groups = groups[:len(groups)-1]
	}
	if len(groups) == 0 {
		return nil
	}
	g := groups[len(groups)-1]
	var charts []timeline.Chart
	for _, o := range operations {
		m, ok := g.middle(o.seconds)
		if !ok {
			return nil
		}
		op := o.of(m)
		title := fmt.Sprintf("%s of %s: %s, the median of %d", o.name, g.Shape, Seconds(op.Seconds), len(g.runs[Ours]))
		charts = append(charts, timeline.Chart{Title: title, Phases: clientPhases(op), Whole: time.Duration(op.Seconds * float64(time.Second))})
	}
	return timeline.SVG(charts...)
}

// clientPhases are an operation's phases on the client's clock: its pause comes
// first, with the lock in it.
func clientPhases(op Operation) []images.Phase {
	if op.Covered == 0 || op.Pause == 0 { // no timeline of the shim's, or no pause
		return ByStart(op.Phases)
	}
	pause := time.Duration(op.Pause * float64(time.Second))
	phases := []images.Phase{{Name: "pause", Took: pause}}
	for _, p := range op.Phases {
		if p.Name != "lock" {
			p.Start += pause
		}
		phases = append(phases, p)
	}
	return ByStart(phases)
}
