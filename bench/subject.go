// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpuckpt/gpuckpt/bench/report"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// subject is a workload under one method. Its calls come in this order:
// checkpoint, end, restore, remove; remove also after a failure.
type subject interface {
	// checkpoint dumps the workload. Unless leave, it has ended then.
	checkpoint(ctx context.Context, leave bool) (report.Operation, error)
	// end ends what still runs, and waits for it.
	end(ctx context.Context) error
	// restore has the workload go on from its images.
	restore(ctx context.Context) (report.Operation, error)
	// remove ends and removes all but the images.
	remove(ctx context.Context) error
	// logs is what may explain a failure.
	logs() string
}

// workload is how gpuwork is run for a shape.
type workload struct {
	report.Shape
	port int // of the first process; the others follow
}

// newWorkload finds ports for it.
func newWorkload(s report.Shape) (workload, error) {
	port, err := harness.FreePorts(s.Procs)
	return workload{Shape: s, port: port}, err
}

// args are gpuwork's.
func (w workload) args() []string {
	port := strconv.Itoa(w.port)
	if w.Content == report.ContentNone && w.Host > 0 {
		return []string{"memory", "--bytes", strconv.FormatUint(w.Host, 10), "--port", port}
	}
	if w.Content == report.ContentNone {
		return []string{"plain", "--port", port}
	}
	args := []string{"pattern"}
	if w.Procs > 1 {
		args = []string{"multi", "--procs", strconv.Itoa(w.Procs), "--gpus", strconv.Itoa(w.GPUs)}
	}
	if w.Host > 0 {
		args = append(args, "--host-bytes", strconv.FormatUint(w.Host, 10))
	}
	if kind := slices.Index(report.HostKinds, w.HostKind); kind > 0 {
		args = append(args, "--pinned", strconv.Itoa(kind))
	}
	return append(args, "--bytes", strconv.FormatUint(w.Size, 10), "--content", w.Content, "--seed", "7", "--port", port)
}

// gpus are the indices of the GPUs that the container gets.
func (w workload) gpus() []int {
	var indices []int
	for i := range w.GPUs {
		indices = append(indices, i)
	}
	return indices
}

// verify asks each process whether all of its memory is right; one that has
// none has nothing but its count, which must be the one given.
func (w workload) verify(ctx context.Context, count int) error {
	for i := range w.Procs {
		question, want := "verify", "bad=0"
		switch {
		case w.Content == report.ContentNone && w.Host > 0:
			want = "bad=0,0" // its own, and its child's
		case w.Content == report.ContentNone:
			question, want = "count", strconv.Itoa(count)
		}
		k := &harness.Container{ID: fmt.Sprintf("process %d", i), Port: w.port + i}
		answer, err := k.Ask(ctx, question)
		if err != nil {
			return fmt.Errorf("verify: %w", err)
		}
		if answer != want {
			return fmt.Errorf("verify: process %d answers %q to %q, it should be %q", i, answer, question, want)
		}
	}
	return nil
}

// stopwatch notes the phases of a method that has no timeline of its own.
type stopwatch struct {
	began  time.Time
	phases []images.Phase
}

func startWatch() *stopwatch { return &stopwatch{began: time.Now()} }

// time runs one phase.
func (w *stopwatch) time(name string, do func() error) error {
	start := time.Now()
	err := do()
	w.phases = append(w.phases, images.Phase{Name: name, Start: start.Sub(w.began), Took: time.Since(start)})
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// seconds is the time since the start.
func (w *stopwatch) seconds() float64 { return time.Since(w.began).Seconds() }

// driverSeconds is what the phases of the driver's calls took together. Phases
// named after the driver are preferred; the shim's steps around its calls come
// next.
func driverSeconds(phases []images.Phase) float64 {
	var named, steps time.Duration
	for _, p := range phases {
		switch {
		case strings.Contains(p.Name, "driver"):
			named += p.Took
		case p.Name == "save GPU state" || p.Name == "restore GPU state":
			steps += p.Took
		}
	}
	if named > 0 {
		return named.Seconds()
	}
	return steps.Seconds()
}

// covered is the share of a time, in seconds, in which at least one phase ran.
// The lock is left out when it was taken in a pause before.
func covered(phases []images.Phase, whole float64) float64 {
	var union, end time.Duration
	for _, p := range report.ByStart(phases) {
		if p.Name == "lock" {
			continue
		}
		if stop := p.Start + p.Took; stop > end {
			union += stop - max(p.Start, end)
			end = stop
		}
	}
	if whole <= 0 {
		return 0
	}
	return union.Seconds() / whole
}
