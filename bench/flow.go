// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpuckpt/gpuckpt/bench/report"
	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/registryserver"
)

const (
	flowEvery = 20 * time.Millisecond
	// flowMost bounds the points: half of them go when there are more, and as many moments.
	flowMost = 400
)

// watchFlow follows a restore of a program that will listen at a port. The function that it returns
// ends that, and returns the points.
func watchFlow(ctx context.Context, server *registryserver.Server, port int, gpu harness.GPUKind) func() []report.FlowPoint {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan []report.FlowPoint, 1)
	go func() {
		began, every := time.Now(), flowEvery
		w := flowWatch{port: strconv.Itoa(port), times: 1}
		if gpu == harness.SoftwareGPU {
			w.times = 2
		}
		var points []report.FlowPoint
		for ctx.Err() == nil {
			p := report.FlowPoint{Seconds: time.Since(began).Seconds(), Sent: server.Sent()}
			p.Copied = w.look()
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
	return func() []report.FlowPoint {
		cancel()
		return <-done
	}
}

// flowWatch looks at the program of a restore, as it comes.
type flowWatch struct {
	port    string
	program int
	base    uint64 // of the program
	// times is how often a byte of GPU state counts: twice with the software GPU, whose memory the
	// program has as well.
	times uint64
	seen  uint64
}

// look returns what of files the program has in memory. Of a process that is not there, or no more, it is what it was.
func (w *flowWatch) look() uint64 {
	if w.program == 0 {
		w.find()
	}
	if w.program != 0 {
		if now, err := fileMemory(w.program); err == nil {
			if w.base == 0 {
				w.base = now
			}
			w.seen = max(w.seen, above(now, w.base)/w.times)
		}
	}
	return w.seen
}

// find finds the program by its arguments.
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
		if at := slices.Index(args, "--port"); at >= 0 && at+1 < len(args) && args[at+1] == w.port {
			w.program, _ = strconv.Atoi(filepath.Base(dir))
			return
		}
	}
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
