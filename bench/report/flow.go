// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"fmt"
	"image/color"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// FlowPoint is how far the bytes of a checkpoint are at a moment of its restore.
type FlowPoint struct {
	// Seconds since the restore was asked for.
	Seconds float64 `json:"seconds"`
	// Sent is what the registry has sent of blobs.
	Sent uint64 `json:"sentBytes"`
	// Copied is how much of files the program has in its memory, more than at first: the driver's
	// thread reads GPU state there and copies it to the GPU.
	Copied uint64 `json:"copiedBytes"`
}

// flows are the lines of the picture.
var flows = []struct {
	legend string
	color  color.RGBA
	of     func(FlowPoint) uint64
}{
	{"sent by the registry", color.RGBA{R: 0x00, G: 0x72, B: 0xb2, A: 0xff}, func(p FlowPoint) uint64 { return p.Sent }},
	{"read by the program, for the GPU", color.RGBA{R: 0x00, G: 0x9e, B: 0x73, A: 0xff}, func(p FlowPoint) uint64 { return p.Copied }},
}

// flowPicture draws the arrivals of the last verified run with a registry, beside each other; nil
// without any.
func (r *Results) flowPicture() ([]byte, error) {
	var plots []*plot.Plot
	for _, run := range slices.Backward(r.RegistryRuns) {
		if !run.Verified {
			continue
		}
		for _, a := range run.Arrivals {
			if len(a.Flow) < 2 {
				continue
			}
			p, err := run.flowPlot(a)
			if err != nil {
				return nil, err
			}
			plots = append(plots, p)
		}
		break
	}
	if len(plots) == 0 {
		return nil, nil
	}
	canvas := vgsvg.New(vg.Length(len(plots))*16*vg.Centimeter, 11*vg.Centimeter)
	tiles := draw.Tiles{Rows: 1, Cols: len(plots), PadX: 8 * vg.Millimeter, PadTop: 2 * vg.Millimeter, PadRight: 4 * vg.Millimeter, PadLeft: 2 * vg.Millimeter, PadBottom: 2 * vg.Millimeter}
	for i, c := range plot.Align([][]*plot.Plot{plots}, tiles, draw.New(canvas))[0] {
		plots[i].Draw(c)
	}
	var out bytes.Buffer
	_, err := canvas.WriteTo(&out)
	return out.Bytes(), err
}

func (r RegistryRun) flowPlot(a ArrivalRun) (*plot.Plot, error) {
	const scale = 1 << 30
	p := plot.New()
	p.Title.Padding = vg.Points(6)
	p.Title.Text = fmt.Sprintf("%s from a registry, %s: runs after %s", FormatSize(r.Size), RateText(a.Rate), Seconds(a.Running))
	p.X.Label.Text, p.Y.Label.Text = "seconds since the restore was asked for", "GiB"
	p.Legend.Top, p.Legend.Left, p.Legend.Padding = true, true, vg.Points(3)
	p.Add(plotter.NewGrid())
	end, most := a.Running*1.05, 0.0
	add := func(legend string, points plotter.XYs, c color.Color, dashed bool) error {
		line, err := plotter.NewLine(points)
		if err != nil {
			return fmt.Errorf("draw the bytes over time: %w", err)
		}
		line.Color, line.Width = c, vg.Points(1.5)
		if dashed {
			line.Dashes, line.Width = []vg.Length{vg.Points(4), vg.Points(3)}, vg.Points(1)
		}
		p.Add(line)
		p.Legend.Add(legend, line)
		return nil
	}
	for _, f := range flows {
		var points plotter.XYs
		for _, at := range a.Flow {
			if at.Seconds > end {
				break
			}
			y := float64(f.of(at)) / scale
			most = max(most, y)
			points = append(points, plotter.XY{X: at.Seconds, Y: y})
		}
		if err := add(f.legend, points, f.color, false); err != nil {
			return nil, err
		}
	}
	grey := color.Gray{Y: 0x60}
	if alone := r.alone(a); alone > 0 {
		if err := add("the registry's limit", plotter.XYs{{X: 0, Y: 0}, {X: alone, Y: float64(a.Fetched) / scale}}, grey, true); err != nil {
			return nil, err
		}
	}
	if err := add("it runs", plotter.XYs{{X: a.Running, Y: 0}, {X: a.Running, Y: most}}, color.Gray{Y: 0xa0}, false); err != nil {
		return nil, err
	}
	p.X.Min, p.Y.Min, p.X.Max, p.Y.Max = 0, 0, end, most*1.4 // room for the legend
	return p, nil
}
