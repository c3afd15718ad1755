// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package timeline draws the phases of operations as SVG: a bar for each, on one axis of time. A browser
// shows a phase's name, times and bytes under the pointer.
package timeline

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"math"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/docker/go-units"

	"github.com/gpuckpt/gpuckpt/images"
)

// The measures, in pixels.
const (
	pictureWidth = 900
	labelWidth   = 210
	valueWidth   = 190
	rowHeight    = 20
	titleHeight  = 54 // with the legend
	axisHeight   = 40
	noteHeight   = 18
	fontSize     = 12
	titleSize    = 14 // at most
)

// What a letter takes of its font's size, on average and not less: texts are wrapped and shrunk by it.
const (
	letter     = 0.6
	boldLetter = 0.66
)

// tiny is the part of an operation below which a step has no bar, but is named below the axis.
const tiny = 500

// style has a picture's colors, for a light page and for a dark one.
const style = `<style>
.back { fill: #ffffff; }
.grid { stroke: #d8dee4; }
.driver { fill: #d55e00; }
.step { fill: #0072b2; }
.failed { fill: #b00020; }
text { fill: #1f2328; }
.dim { fill: #57606a; }
@media (prefers-color-scheme: dark) {
.back { fill: #0d1117; }
.grid { stroke: #30363d; }
.driver { fill: #f0883e; }
.step { fill: #58a6ff; }
.failed { fill: #ff7b72; }
text { fill: #e6edf3; }
.dim { fill: #9198a1; }
}
</style>
`

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
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="Liberation Sans, Arial, sans-serif" font-size="%d">`+"\n",
		pictureWidth, y, pictureWidth, y, fontSize)
	out.WriteString(style)
	fmt.Fprintf(&out, `<rect class="back" width="%d" height="%d"/>`+"\n", pictureWidth, y)
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
	size := min(titleSize, (pictureWidth-20)/(boldLetter*float64(max(1, utf8.RuneCountInString(title)))))
	fmt.Fprintf(out, `<text x="10" y="%d" font-size="%.3g" font-weight="bold">%s</text>`+"\n", y+22, size, escape(title))
	phases, left := c.drawn(phases, whole)
	c.legend(out, y+40)
	top := y + titleHeight
	bottom := top + rowHeight*len(phases)
	step, free := tick(whole), 0.0
	for t := time.Duration(0); t <= whole; t += step {
		fmt.Fprintf(out, `<line class="grid" x1="%.1f" x2="%.1f" y1="%d" y2="%d"/>`+"\n", x(t), x(t), top, bottom)
		half := letter * fontSize * float64(utf8.RuneCountInString(t.String())) / 2
		if x(t)-half >= free {
			fmt.Fprintf(out, `<text class="dim" x="%.1f" y="%d" text-anchor="middle">%s</text>`+"\n", x(t), bottom+15, t)
			free = x(t) + half + letter*fontSize
		}
	}
	for i, p := range phases {
		row := top + i*rowHeight
		fmt.Fprintf(out, `<g><title>%s</title><text x="%d" y="%d" text-anchor="end">%s</text>`, escape(hover(p)), labelWidth-8, row+14, escape(p.Name))
		fmt.Fprintf(out, `<rect class="%s" x="%.1f" y="%d" width="%.1f" height="%d" rx="2"/>`,
			c.class(p), x(p.Start), row+3, max(1, x(p.Start+p.Took)-x(p.Start)), rowHeight-6)
		fmt.Fprintf(out, `<text x="%.1f" y="%d">%s</text></g>`+"\n", x(p.Start+p.Took)+5, row+14, escape(phaseValue(p)))
	}
	notes := short(left)
	for i, n := range notes {
		fmt.Fprintf(out, `<g><title>%s</title><text class="dim" x="10" y="%d">%s</text></g>`+"\n", escape(n.hover), bottom+15+noteHeight*(i+1), escape(n.text))
	}
	return titleHeight + rowHeight*len(phases) + axisHeight + noteHeight*len(notes)
}

// note is a line of names below the axis, and what a browser shows over it.
type note struct{ text, hover string }

// short names the phases that have no bar, in lines that are no wider than the picture.
func short(left []images.Phase) (lines []note) {
	line := note{text: "too short to see: "}
	for i, p := range left {
		name := p.Name
		if i < len(left)-1 {
			name += ", "
		}
		if letter*fontSize*float64(utf8.RuneCountInString(line.text+name)) > pictureWidth-20 {
			lines, line = append(lines, line), note{}
		}
		line.text += name
		line.hover = strings.TrimPrefix(line.hover+"\n"+hover(p), "\n")
	}
	if len(left) > 0 {
		lines = append(lines, line)
	}
	return lines
}

// drawn returns the phases that have a bar, and those that are too short for one. One that failed has a bar.
func (c Chart) drawn(phases []images.Phase, whole time.Duration) (bars, left []images.Phase) {
	for _, p := range phases {
		if p.Took < whole/tiny && p.Name != c.Failed {
			left = append(left, p)
		} else {
			bars = append(bars, p)
		}
	}
	return bars, left
}

// legend says what the colors are.
func (c Chart) legend(out *bytes.Buffer, y int) {
	kinds := [][2]string{{"driver", "the driver moves GPU memory"}, {"step", "shim and CRIU"}}
	if c.Failed != "" {
		kinds = append(kinds, [2]string{"failed", "failed"})
	}
	for i, kind := range kinds {
		fmt.Fprintf(out, `<rect class="%s" x="%d" y="%d" width="12" height="12" rx="2"/><text class="dim" x="%d" y="%d">%s</text>`+"\n",
			kind[0], labelWidth+i*230, y-10, labelWidth+18+i*230, y, kind[1])
	}
}

// class sets apart what the driver does, and what failed.
func (c Chart) class(p images.Phase) string {
	switch {
	case p.Name == c.Failed:
		return "failed"
	case strings.Contains(p.Name, "driver"), strings.HasSuffix(p.Name, "GPU state") && p.Name != "store GPU state" && p.Name != "map GPU state", p.Name == "give GPU state back":
		return "driver"
	}
	return "step"
}

// phaseValue is the text beside a bar.
func phaseValue(p images.Phase) string {
	text := milliseconds(p.Took)
	if p.Bytes > 0 {
		text += ", " + units.BytesSize(float64(p.Bytes))
	}
	return text
}

// hover is what a browser shows of a phase.
func hover(p images.Phase) string {
	return fmt.Sprintf("%s: %s, from %s on", p.Name, phaseValue(p), milliseconds(p.Start))
}

func milliseconds(d time.Duration) string {
	if d < 10*time.Millisecond {
		return fmt.Sprintf("%.1f ms", d.Seconds()*1e3)
	}
	return fmt.Sprintf("%.0f ms", d.Seconds()*1e3)
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
