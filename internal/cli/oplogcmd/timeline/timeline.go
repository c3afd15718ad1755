// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package timeline draws the phases of operations as SVG: a bar for each, on one axis of time.
package timeline

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/docker/go-units"

	"github.com/gpuckpt/gpuckpt/images"
)

// The measures, in pixels.
const (
	pictureWidth = 900
	labelWidth   = 210
	valueWidth   = 190
	rowHeight    = 20
	titleHeight  = 34
	axisHeight   = 40
)

// longest is the longest axis. The log of operations may hold a number that is no time of anything,
// and twice the axis must be a duration.
const longest = 1000 * time.Hour

// Chart is one operation.
type Chart struct {
	Title string
	// Phases in the order in which they are drawn, downwards.
	Phases []images.Phase
	// Whole is how long the operation took.
	Whole time.Duration
	// Failed is the name of a phase that failed, "" if none did.
	Failed string
}

// SVG draws charts below one another.
func SVG(charts ...Chart) []byte {
	var body bytes.Buffer
	y := 0
	for _, c := range charts {
		y += c.draw(&body, y)
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="Liberation Sans, Arial, sans-serif" font-size="12">`+"\n",
		pictureWidth, y, pictureWidth, y)
	fmt.Fprintf(&out, `<rect width="%d" height="%d" fill="white"/>`+"\n", pictureWidth, y)
	out.Write(body.Bytes())
	out.WriteString("</svg>\n")
	return out.Bytes()
}

// draw draws a chart below y and returns its height. The axis is as long as the whole, or as the
// phases where they go on after it.
func (c Chart) draw(out *bytes.Buffer, y int) int {
	whole, phases, title := c.Whole, c.Phases, c.Title
	for _, p := range phases {
		whole = max(whole, p.Start+p.Took)
	}
	whole = min(whole, longest)
	width := float64(pictureWidth - labelWidth - valueWidth)
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
			x(p.Start), row+3, max(1, x(p.Start+p.Took)-x(p.Start)), rowHeight-6, c.color(p))
		fmt.Fprintf(out, `<text x="%.1f" y="%d" fill="#333">%s</text>`+"\n", x(p.Start+p.Took)+5, row+14, escape(phaseValue(p)))
	}
	return titleHeight + rowHeight*len(phases) + axisHeight
}

// color sets apart what the driver does, and what failed.
func (c Chart) color(p images.Phase) string {
	if p.Name == c.Failed {
		return "#b00020"
	}
	if strings.Contains(p.Name, "driver") || strings.HasSuffix(p.Name, "GPU state") && p.Name != "store GPU state" || p.Name == "give GPU state back" {
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
		text += ", " + units.BytesSize(float64(p.Bytes))
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
			return max(1, time.Duration(power*m)) // of a nanosecond there is no half
		}
	}
	return max(1, time.Duration(power))
}

func escape(text string) string {
	var b bytes.Buffer
	_ = xml.EscapeText(&b, []byte(text)) // a buffer takes everything
	return b.String()
}
