// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"slices"
)

// nodesStyle has the picture's colors, for a light page and for a dark one, as those of timelines.
const nodesStyle = `<style>
.back { fill: #ffffff; }
.grid { stroke: #d8dee4; }
text { fill: #1f2328; }
.dim { fill: #57606a; }
.line { fill: none; stroke-width: 2; }
.limit { fill: none; stroke-width: 1.5; stroke-dasharray: 5 4; }
.one { color: #d55e00; }
.cold { color: #b06fa0; }
.warm { color: #0072b2; }
.fill { color: #009e73; }
.node { color: #57606a; }
.line, .limit { stroke: currentColor; }
.dot { fill: currentColor; }
@media (prefers-color-scheme: dark) {
.back { fill: #0d1117; }
.grid { stroke: #30363d; }
text { fill: #e6edf3; }
.dim { fill: #9198a1; }
.one { color: #f0883e; }
.cold { color: #d2a8ff; }
.warm { color: #58a6ff; }
.fill { color: #3fb950; }
.node { color: #9198a1; }
}
</style>
`

// nodesClasses are the colors of the ways.
var nodesClasses = map[string]string{OneRegistry: "one", ColdRacks: "cold", WarmRacks: "warm"}

// panel is a part of the picture with axes.
type panel struct {
	out                 *bytes.Buffer
	left, top, w, h     float64
	least, most, lo, hi float64 // of nodes, and of seconds
	logarithmic         bool
}

func (p panel) scale(v, from, to float64) float64 {
	if p.logarithmic {
		v, from, to = math.Log(v), math.Log(from), math.Log(to)
	}
	return (v - from) / (to - from)
}

func (p panel) x(nodes float64) float64   { return p.left + p.w*p.scale(nodes, p.least, p.most) }
func (p panel) y(seconds float64) float64 { return p.top + p.h*(1-p.scale(seconds, p.lo, p.hi)) }

// axes draws the grid with labels, and a title.
func (p panel) axes(title string, nodes, seconds []float64) {
	fmt.Fprintf(p.out, `<text x="%.0f" y="%.0f" font-weight="bold">%s</text>`+"\n", p.left-40, p.top-34, title)
	fmt.Fprintf(p.out, `<text class="dim" x="%.0f" y="%.0f">seconds until the last node's program answers</text>`+"\n", p.left-40, p.top-14)
	for _, s := range seconds {
		fmt.Fprintf(p.out, `<line class="grid" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f"/><text class="dim" x="%.1f" y="%.1f" text-anchor="end">%g</text>`+"\n", p.left, p.left+p.w, p.y(s), p.y(s), p.left-6, p.y(s)+4, s)
	}
	for _, n := range nodes {
		fmt.Fprintf(p.out, `<line class="grid" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f"/><text class="dim" x="%.1f" y="%.1f" text-anchor="middle">%g</text>`+"\n", p.x(n), p.x(n), p.top, p.top+p.h, p.x(n), p.top+p.h+16, n)
	}
	fmt.Fprintf(p.out, `<text class="dim" x="%.1f" y="%.1f" text-anchor="middle">nodes</text>`+"\n", p.left+p.w/2, p.top+p.h+34)
}

// curve draws a line of a class through points of nodes and seconds.
func (p panel) curve(class string, points [][2]float64) {
	fmt.Fprintf(p.out, `<polyline class="%s" points="`, class)
	for _, at := range points {
		fmt.Fprintf(p.out, "%.1f,%.1f ", p.x(at[0]), p.y(at[1]))
	}
	p.out.WriteString("\"/>\n")
}

// end is the label at the end of a line.
type end struct {
	class, text string
	y           float64
}

// labels writes the names of lines beside their ends, none over another.
func (p panel) labels(ends []end) {
	slices.SortFunc(ends, func(a, b end) int { return cmp.Compare(a.y, b.y) })
	free := 0.0
	for _, e := range ends {
		e.y = max(e.y+4, free)
		free = e.y + 15
		fmt.Fprintf(p.out, `<g class="%s"><circle class="dot" cx="%.1f" cy="%.1f" r="4"/><text x="%.1f" y="%.1f">%s</text></g>`+"\n", e.class, p.left+p.w+12, e.y-4, p.left+p.w+20, e.y, e.text)
	}
}

// nodesPicture draws the points with the model, for the rates of the first run, and the model for many nodes;
// nil without enough of them.
func nodesPicture(runs []NodesRun) []byte {
	m, err := fitNodes(runs)
	if err != nil {
		return nil
	}
	var points []nodesPoint
	for _, p := range nodesPoints(runs) {
		if p.PerNode == 1 && p.rates() == runs[0].rates() && p.Size == runs[0].Size {
			points = append(points, p)
		}
	}
	const width, height = 1180, 380
	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="Liberation Sans, Arial, sans-serif" font-size="12">`+"\n", width, height, width, height)
	out.WriteString(nodesStyle)
	fmt.Fprintf(&out, `<rect class="back" width="%d" height="%d"/>`+"\n", width, height)
	measuredNodes(&out, m, points)
	manyNodes(&out, m)
	out.WriteString("</svg>\n")
	return out.Bytes()
}

// measuredNodes draws the points, with what a browser shows over each, and the model through them.
func measuredNodes(out *bytes.Buffer, m nodesModel, points []nodesPoint) {
	p := panel{out: out, left: 60, top: 66, w: 300, h: 250}
	var nodes []float64
	for _, at := range points {
		p.most, p.hi = max(p.most, float64(at.Nodes)), max(p.hi, at.last.Max, m.of(at.alone.Median, at.Nodes))
		if !slices.Contains(nodes, float64(at.Nodes)) {
			nodes = append(nodes, float64(at.Nodes))
		}
	}
	step := math.Pow(10, math.Floor(math.Log10(p.hi)))
	if p.hi/step < 3 {
		step /= 5
	}
	p.hi = step * math.Ceil(p.hi/step)
	var seconds []float64
	for s := 0.0; s <= p.hi; s += step {
		seconds = append(seconds, s)
	}
	r := points[0]
	p.axes(fmt.Sprintf("Measured, %s without a GPU: registry %d, rack %d, node %d MB/s", FormatSize(r.Size), r.RegistryRate/1e6, r.RackRate/1e6, r.NodeRate/1e6), nodes, seconds)
	var ends []end
	for _, way := range []string{OneRegistry, ColdRacks, WarmRacks} {
		class, last := nodesClasses[way], 0.0
		var model [][2]float64
		fmt.Fprintf(out, `<g class="%s">`+"\n", class)
		for _, at := range points {
			if at.Way != way {
				continue
			}
			x := p.x(float64(at.Nodes))
			last = m.of(at.alone.Median, at.Nodes)
			model = append(model, [2]float64{float64(at.Nodes), last})
			fmt.Fprintf(out, `<g><title>%s, %d nodes: %s, of %d runs; by the model %s; the registry sent %.1f images</title><line class="line" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f"/><circle class="dot" cx="%.1f" cy="%.1f" r="5"/></g>`+"\n",
				way, at.Nodes, Seconds(at.last.Median), at.last.N, Seconds(last), at.copies.Median, x, x, p.y(at.last.Min), p.y(at.last.Max), x, p.y(at.last.Median))
		}
		p.curve("line", model)
		out.WriteString("</g>\n")
		if len(model) > 0 {
			ends = append(ends, end{class, way, p.y(last)})
		}
	}
	p.labels(ends)
}

// manyNodes draws the model's lines, and the limits of links.
func manyNodes(out *bytes.Buffer, m nodesModel) {
	p := panel{out: out, left: 640, top: 66, w: 310, h: 250, least: 10, most: 1000, lo: 1, hi: 10000, logarithmic: true}
	p.axes(fmt.Sprintf("By the model, %.0f GB: registry and node %g GB/s, rack of %d %g GB/s", example.bytes/1e9, example.registry/1e9, example.perRack, example.rack/1e9),
		[]float64{10, 30, 100, 300, 1000}, []float64{1, 10, 100, 1000, 10000})
	var ends []end
	for _, l := range exampleLines {
		class := "line"
		if l.limit {
			class = "limit"
		}
		var points [][2]float64
		for i := range 101 {
			n := math.Pow(10, 1+float64(i)/50)
			points = append(points, [2]float64{n, m.example(l, n)})
		}
		fmt.Fprintf(out, `<g class="%s"><title>%s: %s for 10 nodes, %s for 100, %s for 1000</title>`, l.class, l.name, Seconds(m.example(l, 10)), Seconds(m.example(l, 100)), Seconds(m.example(l, 1000)))
		p.curve(class, points)
		out.WriteString("</g>\n")
		ends = append(ends, end{l.class, l.name, p.y(points[100][1])})
	}
	p.labels(ends)
}
