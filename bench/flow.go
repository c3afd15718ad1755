// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"image/color"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// flowPoint is how far the bytes of a checkpoint are at a moment of its restore.
type flowPoint struct {
	// Seconds since the restore was asked for.
	Seconds float64 `json:"seconds"`
	// Sent is what the registry has sent of blobs.
	Sent uint64 `json:"sentBytes"`
	// Digested is what the shim has read of files: it reads GPU state to digest it.
	Digested uint64 `json:"digestedBytes"`
	// Copied is how much of files the program has in its memory, more than at first: the driver's
	// thread reads GPU state there and copies it to the GPU.
	Copied uint64 `json:"copiedBytes"`
}

const (
	flowEvery = 20 * time.Millisecond
	// flowMost bounds the points: half of them go when there are more, and as many moments.
	flowMost = 400
)

// watchFlow follows a restore of a program that will listen at a port. The function that it returns
// ends that, and returns the points.
func watchFlow(ctx context.Context, limit *limiter, port int, gpu harness.GPUKind) func() []flowPoint {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan []flowPoint, 1)
	go func() {
		began, every := time.Now(), flowEvery
		w := flowWatch{port: strconv.Itoa(port), times: 1}
		if gpu == harness.SoftwareGPU {
			w.times = 2
		}
		var points []flowPoint
		for ctx.Err() == nil {
			p := flowPoint{Seconds: time.Since(began).Seconds(), Sent: limit.count()}
			p.Digested, p.Copied = w.look()
			if points = append(points, p); len(points) > flowMost {
				for i := range flowMost / 2 {
					points[i] = points[2*i]
				}
				points, every = points[:flowMost/2], 2*every
			}
			select {
			case <-ctx.Done():
			case <-time.After(every):
			}
		}
		done <- points
	}()
	return func() []flowPoint {
		cancel()
		return <-done
	}
}

// flowWatch looks at the processes of a restore, as they come.
type flowWatch struct {
	port          string
	shim, program int
	base          uint64 // of the program
	// times is how often a byte of GPU state counts: twice with the software GPU, whose memory the
	// program has as well.
	times uint64
	seen  [2]uint64
}

// look returns what the shim has read, and what of files the program has in memory. Of a process that
// is not there, or no more, it is what it was.
func (w *flowWatch) look() (digested, copied uint64) {
	if w.shim == 0 || w.program == 0 {
		w.find()
	}
	if w.program != 0 {
		if now, err := fileMemory(w.program); err == nil {
			if w.base == 0 {
				w.base = now
			}
			w.seen[1] = max(w.seen[1], above(now, w.base)/w.times)
		}
	}
	if w.shim != 0 {
		if now, err := bytesRead(w.shim); err == nil {
			w.seen[0] = max(w.seen[0], now)
		}
	}
	return w.seen[0], w.seen[1]
}

// find finds the program by its arguments, and the shim above it.
func (w *flowWatch) find() {
	all, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return
	}
	for _, dir := range all {
		line, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil {
			continue // it has ended
		}
		args := strings.Split(string(line), "\x00")
		at := slices.Index(args, "--port")
		if at < 0 || at+1 == len(args) || args[at+1] != w.port {
			continue
		}
		w.program, _ = strconv.Atoi(filepath.Base(dir))
		w.shim = shimAbove(w.program)
		return
	}
}

// shimAbove returns the process above others that is a shim; 0 if there is none.
func shimAbove(pid int) int {
	for pid > 1 {
		name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		if err != nil {
			return 0
		}
		if strings.HasPrefix(string(name), "containerd-shim") {
			return pid
		}
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			return 0
		}
		_, rest, _ := strings.Cut(string(status), "\nPPid:")
		parent, _, _ := strings.Cut(rest, "\n")
		if pid, err = strconv.Atoi(strings.TrimSpace(parent)); err != nil {
			return 0
		}
	}
	return 0
}

// fileMemory returns how much of files and of shared memory a process has in its memory, in bytes.
func fileMemory(pid int) (uint64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(data))
	if len(fields) < 3 {
		return 0, fmt.Errorf("/proc/%d/statm has %d fields", pid, len(fields))
	}
	pages, err := strconv.ParseUint(fields[2], 10, 52)
	return pages * uint64(os.Getpagesize()), err
}

// bytesRead returns how many bytes a process has read, by system calls.
func bytesRead(pid int) (uint64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", pid))
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(string(data), "\n")
	return strconv.ParseUint(strings.TrimSpace(strings.TrimPrefix(line, "rchar:")), 10, 64)
}

// flows are the lines of the picture.
var flows = []struct {
	legend string
	color  color.RGBA
	of     func(flowPoint) uint64
}{
	{"sent by the registry", color.RGBA{R: 0x00, G: 0x72, B: 0xb2, A: 0xff}, func(p flowPoint) uint64 { return p.Sent }},
	{"read by the shim, for the digests", color.RGBA{R: 0xd5, G: 0x5e, B: 0x00, A: 0xff}, func(p flowPoint) uint64 { return p.Digested }},
	{"read by the program, for the GPU", color.RGBA{R: 0x00, G: 0x9e, B: 0x73, A: 0xff}, func(p flowPoint) uint64 { return p.Copied }},
}

// flowPicture draws the arrivals of the last verified run with a registry, beside each other; nil
// without any.
func (r *results) flowPicture() ([]byte, error) {
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

func (r registryRun) flowPlot(a arrivalRun) (*plot.Plot, error) {
	const scale = 1 << 30
	p := plot.New()
	p.Title.Padding = vg.Points(6)
	p.Title.Text = fmt.Sprintf("%s from a registry, %s: runs after %s", formatSize(r.Size), rateText(a.Rate), seconds(a.Running))
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
