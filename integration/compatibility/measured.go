// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/cli/oplogcmd/timeline"
)

// bench is what the pictures take of a result of the benchmark.
type bench struct {
	Commit string
	Runs   []run
}

type run struct {
	Method, Mode, Media string
	SizeBytes           uint64
	Verified            bool
	Checkpoint          struct {
		Gap float64 `json:"gapSeconds"`
	}
	Restore struct {
		Seconds float64
		Phases  []images.Phase
	}
}

func readBench(results fs.FS, file string) (bench, error) {
	var b bench
	data, err := fs.ReadFile(results, file)
	if err == nil {
		err = json.Unmarshal(data, &b)
	}
	if err != nil {
		return b, fmt.Errorf("read %s: %w", file, err)
	}
	return b, nil
}

// pauses are the newest results that say for how long a program gave no answer while a checkpoint left it
// running.
var pauses = []struct {
	gib        uint64
	interposer bool
	file       string
}{
	{16, false, "2026-11-23-b47f270-h200-kept/bench-left-running.json"},
	{16, true, "2026-11-24-7920c4d-h200-gpu-digests/bench-16GiB.json"},
	{64, false, "2026-11-23-0c681b5-h200-in-turns/bench-companion.json"},
	{64, true, "2026-11-24-7920c4d-h200-gpu-digests/bench-64GiB.json"},
}

// pausePicture draws them as bars.
func pausePicture(results fs.FS) ([]byte, error) {
	var bars []bar
	for _, p := range pauses {
		b, err := readBench(results, p.file)
		if err != nil {
			return nil, err
		}
		methods := []string{"ours"}
		if p.interposer {
			methods = []string{"companion", "interposer"} // its name until November 2026, and since
		}
		var gaps []float64
		for _, r := range b.Runs {
			if slices.Contains(methods, r.Method) && r.Mode == "leave" && r.Media == "tmpfs" && r.SizeBytes == p.gib<<30 && r.Verified && r.Checkpoint.Gap > 0 {
				gaps = append(gaps, r.Checkpoint.Gap)
			}
		}
		if len(gaps) == 0 {
			return nil, fmt.Errorf("%s has no pause of %d GiB", p.file, p.gib)
		}
		class, label := "cold", fmt.Sprintf("%d GiB, without the interposer", p.gib)
		if p.interposer {
			class, label = "bar", fmt.Sprintf("%d GiB, with the interposer", p.gib)
		}
		// The file has the commit of the programs; of shim and helper it is in the directory's name.
		commit := strings.Split(p.file, "-")[3]
		bars = append(bars, bar{class, label, fmt.Sprintf("H200, commit %s, %s", commit, runs(len(gaps))), median(gaps)})
	}
	return barPicture("Seconds without an answer while a checkpoint leaves a program running", "(GPU memory)", bars), nil
}

func runs(n int) string {
	if n == 1 {
		return "one run"
	}
	return fmt.Sprintf("median of %d runs", n)
}

func median(all []float64) float64 {
	slices.Sort(all)
	n := len(all)
	return (all[(n-1)/2] + all[n/2]) / 2
}

// restored is the result whose median restore restorePicture draws.
const restored = "2026-11-26-52e76ab-h200-two-gpus/bench-16-52.json"

// restorePicture draws the steps of a restore of 16 GiB, on one axis of time.
func restorePicture(results fs.FS) ([]byte, error) {
	b, err := readBench(results, restored)
	if err != nil {
		return nil, err
	}
	all := slices.DeleteFunc(b.Runs, func(r run) bool { return r.Method != "ours" || r.SizeBytes != 16<<30 || !r.Verified })
	if len(all) == 0 {
		return nil, fmt.Errorf("%s has no restore of 16 GiB", restored)
	}
	slices.SortFunc(all, func(x, y run) int { return cmp.Compare(x.Restore.Seconds, y.Restore.Seconds) })
	middle := all[(len(all)-1)/2].Restore
	return timeline.SVG(timeline.Chart{
		Title:  fmt.Sprintf("Restore of 16 GiB of GPU memory: %.2f s (H200, commit %.7s, %s)", middle.Seconds, b.Commit, runs(len(all))),
		Phases: middle.Phases, Whole: time.Duration(middle.Seconds * float64(time.Second)),
	}), nil
}
