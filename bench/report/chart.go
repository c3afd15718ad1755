// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"fmt"
	"image/color"
	"math"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// methodStyles are how the methods are drawn, told apart by shape as well as by
// colour.
var methodStyles = []struct {
	method, legend string
	color          color.RGBA
	glyph          draw.GlyphDrawer
}{
	{Ours, "gpuckpt", color.RGBA{R: 0x00, G: 0x72, B: 0xb2, A: 0xff}, draw.CircleGlyph{}},
	{Steered, "gpuckpt, copy_threads = 0", color.RGBA{R: 0x56, G: 0xb4, B: 0xe9, A: 0xff}, draw.PyramidGlyph{}},
	{Interposer, "gpuckpt with the interposer", color.RGBA{R: 0xcc, G: 0x79, B: 0xa7, A: 0xff}, draw.CrossGlyph{}},
	{CRIUPlugin, "CRIU with its CUDA plugin", color.RGBA{R: 0xd5, G: 0x5e, B: 0x00, A: 0xff}, draw.TriangleGlyph{}},
	{Stock, "runc's shim, CUDA steps by hand", color.RGBA{R: 0x00, G: 0x9e, B: 0x73, A: 0xff}, draw.BoxGlyph{}},
}

// charted picks the shapes of the chart: one process, on a tmpfs where there
// are any, of the mode and content that come first; by size.
func (r *Results) charted() []group {
	var picked []group
	for _, g := range r.groups() { // tmpfs comes first
		if g.Procs != 1 || g.Content == ContentNone || g.Host > 0 {
			continue
		}
		if len(picked) > 0 && (g.Media != picked[0].Media || g.Mode != picked[0].Mode || g.Content != picked[0].Content) {
			continue
		}
		picked = append(picked, g)
	}
	return picked
}

// chart draws time against size, checkpoint and restore side by side; nil when
// there is nothing to draw.
func (r *Results) chart() ([]byte, error) {
	groups := r.charted()
	if len(groups) == 0 {
		return nil, nil
	}
	scale, unit := float64(1<<30), "GiB"
	if groups[len(groups)-1].Size < 1<<30 {
		scale, unit = 1<<20, "MiB"
	}
	plots := make([]*plot.Plot, len(operations))
	for i, o := range operations {
		p := plot.New()
		p.Title.Padding = vg.Points(6)
		p.Title.Text = fmt.Sprintf("%s, %s, images on %s", o.name, groups[0].Content, groups[0].Media)
		p.X.Label.Text = "GPU memory, " + unit
		p.Y.Label.Text = "seconds, median and extremes"
		p.X.Min, p.Y.Min = 0, 0
		p.Legend.Top, p.Legend.Left, p.Legend.Padding = true, true, vg.Points(3)
		p.X.Tick.Marker = sizeTicks(groups, scale)
		p.Add(plotter.NewGrid())
		for _, style := range methodStyles {
			var points samples
			for _, g := range groups {
				if s := g.of(style.method, o.seconds); s.N > 0 {
					points = append(points, sample{float64(g.Size) / scale, s})
				}
			}
			if len(points) == 0 {
				continue
			}
			line, dots, err := plotter.NewLinePoints(points)
			if err != nil {
				return nil, fmt.Errorf("draw the chart: %w", err)
			}
			bars, err := plotter.NewYErrorBars(points)
			if err != nil {
				return nil, fmt.Errorf("draw the chart: %w", err)
			}
			line.Color, dots.Color, bars.Color = style.color, style.color, style.color
			line.Width, dots.Radius, dots.Shape = vg.Points(1.5), vg.Points(3), style.glyph
			p.Add(line, dots, bars)
			p.Legend.Add(style.legend, line, dots)
		}
		if r.PCIe > 0 {
			limit := plotter.NewFunction(func(x float64) float64 { return x * scale / r.PCIe })
			limit.Dashes = []vg.Length{vg.Points(4), vg.Points(3)}
			limit.Color = color.Gray{Y: 0x60}
			p.Add(limit)
			p.Legend.Add(r.PCIeSource, limit)
		}
		p.X.Max *= 1.05
		p.Y.Max *= 1.35 // room for the legend
		plots[i] = p
	}
	canvas := vgsvg.New(28*vg.Centimeter, 11*vg.Centimeter)
	tiles := draw.Tiles{Rows: 1, Cols: len(plots), PadX: 8 * vg.Millimeter, PadTop: 2 * vg.Millimeter, PadRight: 4 * vg.Millimeter}
	for i, c := range plot.Align([][]*plot.Plot{plots}, tiles, draw.New(canvas))[0] {
		plots[i].Draw(c)
	}
	var out bytes.Buffer
	if _, err := canvas.WriteTo(&out); err != nil {
		return nil, fmt.Errorf("draw the chart: %w", err)
	}
	return out.Bytes(), nil
}

// sizeTicks mark the measured sizes, those that have room.
func sizeTicks(groups []group, scale float64) plot.ConstantTicks {
	var ticks plot.ConstantTicks
	largest := float64(groups[len(groups)-1].Size) / scale
	last := math.Inf(-1)
	for _, g := range slices.Backward(groups) {
		x := float64(g.Size) / scale
		label := strconv.FormatFloat(x, 'f', -1, 64)
		if len(ticks) > 0 && last-x < largest/20 {
			label = ""
		} else {
			last = x
		}
		ticks = append(ticks, plot.Tick{Value: x, Label: label})
	}
	return append(ticks, plot.Tick{Value: 0, Label: "0"})
}

// sample is one point of the chart: a size in the chart's unit, and the times.
type sample struct {
	x float64
	y spread
}

// samples are points with error bars, as plotter wants them.
type samples []sample

func (s samples) Len() int                { return len(s) }
func (s samples) XY(i int) (x, y float64) { return s[i].x, s[i].y.Median }
func (s samples) YError(i int) (low, high float64) {
	return s[i].y.Median - s[i].y.Min, s[i].y.Max - s[i].y.Median
}

// middle is the run of ours whose time is the median's; ok is false without any.
func (g group) middle(seconds func(Run) float64) (middle Run, ok bool) {
	runs := slices.Clone(g.runs[Ours])
	if len(runs) == 0 {
		return Run{}, false
	}
	slices.SortFunc(runs, func(a, b Run) int {
		if seconds(a) < seconds(b) {
			return -1
		}
		return 1
	})
	return runs[(len(runs)-1)/2], true
}
