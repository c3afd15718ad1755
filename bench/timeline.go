// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"math"
	"time"

	"github.com/gpuckpt/gpuckpt/images"
)

// The timeline's measures, in pixels.
const (
	timelineWidth = 900
	labelWidth    = 210
	valueWidth    = 190
	rowHeight     = 20
	titleHeight   = 34
	axisHeight    = 40
)

// timeline draws the phases of one run of ours, of the largest size charted:
// its median checkpoint and its median restore. nil when there is none.
func (r *results) timeline() []byte {
	groups := r.charted()
	for len(groups) > 0 && len(groups[len(groups)-1].runs[ours]) == 0 {
		groups = groups[:len(groups)-1]
	}
	if len(groups) == 0 {
		return nil
	}
	g := groups[len(groups)-1]
	var body bytes.Buffer
	y := 0
	for _, o := range operations {
		m, ok := g.middle(o.seconds)
		if !ok {
			return nil
		}
		op := o.of(m)
		phases := clientPhases(op)
		title := fmt.Sprintf("%s of %s: %s, the median of %d", o.name, g.shape, seconds(op.Seconds), len(g.runs[ours]))
		y += drawPhases(&body, y, title, phases, time.Duration(op.Seconds*float64(time.Second)))
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="Liberation Sans, Arial, sans-serif" font-size="12">`+"\n",
		timelineWidth, y, timelineWidth, y)
	fmt.Fprintf(&out, `<rect width="%d" height="%d" fill="white"/>`+"\n", timelineWidth, y)
	out.Write(body.Bytes())
	out.WriteString("</svg>\n")
	return out.Bytes()
}

// clientPhases are an operation's phases on the client's clock: its pause comes
// first, with the lock in it.
func clientPhases(op operation) []images.Phase {
	if op.Covered == 0 || op.Pause == 0 { // no timeline of the shim's, or no pause
		return byStart(op.Phases)
	}
	pause := time.Duration(op.Pause * float64(time.Second))
	phases := []images.Phase{{Name: "pause", Took: pause}}
	for _, p := range op.Phases {
		if p.Name != "lock" {
			p.Start += pause
		}
		phases = append(phases, p)
	}
	return byStart(phases)
}

// drawPhases draws a bar for each phase below y and gives the height. The axis
// is as long as the whole, or as the phases where they go on after it.
func drawPhases(out *bytes.Buffer, y int, title string, phases []images.Phase, whole time.Duration) int {
	for _, p := range phases {
		whole = max(whole, p.Start+p.Took)
	}
	width := float64(timelineWidth - labelWidth - valueWidth)
	x := func(t time.Duration) float64 {
		if whole <= 0 {
			return labelWidth
		}
		return labelWidth + width*float64(t)/float64(whole)
	}
	fmt.Fprintf(out, `<text x="10" y="%d" font-size="14" font-weight="bold">%s</text>`+"\n", y+22, escape(title))
	top := y + titleHeight
	bottom := top + rowHeight*len(phases)
	step := tick(whole)
	for t := time.Duration(0); t <= whole; t += step {
		fmt.Fprintf(out, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="#ddd"/>`, x(t), x(t), top, bottom)
		fmt.Fprintf(out, `<text x="%.1f" y="%d" text-anchor="middle" fill="#555">%s</text>`+"\n", x(t), bottom+15, t)
	}
	for i, p := range phases {
		row := top + i*rowHeight
		fmt.Fprintf(out, `<text x="%d" y="%d" text-anchor="end">%s</text>`, labelWidth-8, row+14, escape(p.Name))
		fmt.Fprintf(out, `<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="%s"/>`,
			x(p.Start), row+3, max(1, x(p.Start+p.Took)-x(p.Start)), rowHeight-6, phaseColor(p))
		fmt.Fprintf(out, `<text x="%.1f" y="%d" fill="#333">%s</text>`+"\n", x(p.Start+p.Took)+5, row+14, escape(phaseValue(p)))
	}
	return titleHeight + rowHeight*len(phases) + axisHeight
}

// phaseColor sets apart what the driver does.
func phaseColor(p images.Phase) string {
	if driverSeconds([]images.Phase{p}) > 0 || p.Name == "give GPU state back" {
		return "#d55e00"
	}
	return "#0072b2"
}

// phaseValue is the text beside a bar.
func phaseValue(p images.Phase) string {
	text := fmt.Sprintf("%.0f ms", p.Took.Seconds()*1e3)
	if p.Took < 10*time.Millisecond {
		text = fmt.Sprintf("%.1f ms", p.Took.Seconds()*1e3)
	}
	if p.Bytes > 0 {
		text += ", " + roundSize(float64(p.Bytes))
	}
	return text
}

// tick is a step for the axis: 1, 2 or 5 times a power of ten, five to ten of
// them.
func tick(whole time.Duration) time.Duration {
	if whole <= 0 {
		return time.Second
	}
	power := math.Pow(10, math.Floor(math.Log10(float64(whole)/5)))
	for _, m := range []float64{5, 2} {
		if power*m*5 <= float64(whole) {
			return time.Duration(power * m)
		}
	}
	return max(1, time.Duration(power))
}

func escape(text string) string {
	var b bytes.Buffer
	_ = xml.EscapeText(&b, []byte(text)) // a buffer takes everything
	return b.String()
}
