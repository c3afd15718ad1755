// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package workloads

import (
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/workloads/programs"
)

// envCycles is how often TestCycles checkpoints and restores.
const envCycles = "GPUCKPT_TEST_CYCLES"

// footprint is what a program takes, in bytes and pieces.
type footprint struct {
	memory, descriptors, threads, image, gpu float64
}

// values are its numbers by name; the name ends in the unit.
func (f footprint) values() map[string]float64 {
	return map[string]float64{
		"memory_bytes": f.memory, "descriptors_count": f.descriptors, "threads_count": f.threads, "image_bytes": f.image,
		"gpu_bytes": f.gpu,
	}
}

// drift returns by how much of itself the median of the last quarter of values is more than that of
// the first; "" of a quarter is no drift.
func drift(values []float64) float64 {
	quarter := max(1, len(values)/4)
	first, last := median(values[:quarter]), median(values[len(values)-quarter:])
	return last/first - 1
}

// A training with DataLoader's workers goes there and back a hundred times, each time from the
// checkpoint before. Its lines are those of one that nobody interrupted, and it grows by nothing:
// no memory, no descriptors, no threads, no larger images.
func TestCycles(t *testing.T) {
	result := results.Add(t)
	needsPyTorch(t)
	cycle(t, result, true, cyclesWanted(t, 100), programs.Program{File: "dataloader.py", GPU: 2, Host: 14})
}

// The same with processes of Python without CUDA, on any machine.
func TestFewCycles(t *testing.T) {
	result := results.Add(t)
	needsPython(t)
	cycle(t, result, false, cyclesWanted(t, 8), programs.Program{File: "processes.py", Args: []string{"--device", "none"}, Host: 2})
}

func cyclesWanted(t *testing.T, usual int) int {
	t.Helper()
	text := os.Getenv(envCycles)
	if text == "" {
		return usual
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 4 {
		t.Fatalf("%s is %q, not a number of 4 or more", envCycles, text)
	}
	return n
}

func cycle(t *testing.T, result *harness.TestResult, cuda bool, cycles int, p programs.Program) {
	t.Helper()
	t.Parallel()
	takeRoom(t, gpuOf(p), p.Host)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute+time.Duration(cycles)*5*time.Second)
	defer cancel()
	args := append(slices.Clone(p.Args), "--file", workFile, "--steps", "100000")
	// It stays before the other, and does not take a processor for itself.
	whole := start(t, cuda, harness.RunSpec{ID: harness.Name(t) + "-whole"}, p.File, append(slices.Clone(args), "--pause", "0.01")...)
	k := start(t, cuda, harness.RunSpec{ID: harness.Name(t)}, p.File, append(args, "--pause", "0.02")...)
	steps := func(k *harness.Container) []step { return parse(t, readFile(t, k, workFile)).steps }
	await(ctx, t, k, "the first steps", func() bool { return parse(t, k.Logs()).last() >= 5 })

	memory := memoryDir(t)
	var all []footprint
	for number := range cycles {
		dir := filepath.Join(memory, strconv.Itoa(number))
		before := len(steps(k))
		f := processes(t, k)
		began := time.Now()
		f.gpu = float64(checkpointInto(ctx, t, result, k, dir))
		f.image = float64(bytesIn(t, dir))
		took := time.Since(began)
		endTask(ctx, t, k)
		began = time.Now()
		restoreFrom(ctx, t, k, dir)
		restored := time.Since(began)
		await(ctx, t, k, fmt.Sprintf("a step after restore %d", number+1), func() bool { return len(steps(k)) > before })
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		all = append(all, f)
		result.Number(fmt.Sprintf("cycle%03d_checkpoint_seconds", number+1), took.Seconds())
		result.Number(fmt.Sprintf("cycle%03d_restore_seconds", number+1), restored.Seconds())
		for name, value := range f.values() {
			result.Number(fmt.Sprintf("cycle%03d_%s", number+1, name), value)
		}
		if number%10 == 9 || number == 0 {
			t.Logf("cycle %d: at step %d, %+v, checkpoint %v, restore %v", number+1, before, f, took, restored)
		}
	}
	result.Number("cycles_count", float64(cycles))

	got := steps(k)
	await(ctx, t, whole, "as many steps of an uninterrupted run", func() bool { return len(steps(whole)) >= len(got) })
	if want := steps(whole)[:len(got)]; !slices.Equal(got, want) {
		t.Errorf("the steps are not those of an uninterrupted run: %s", difference(got, want))
	}
	for name := range all[0].values() {
		values := make([]float64, 0, len(all))
		for _, f := range all[1:] { // the first one comes from a start, the others from a restore
			values = append(values, f.values()[name])
		}
		if values[0] == 0 {
			continue // this program has none
		}
		grown := drift(values)
		result.Number(name+"_drift_ratio", grown)
		if grown > 0.03 {
			t.Errorf("%s drifts: it grows by %.1f %% over %d cycles: %.0f", name, grown*100, cycles, values)
		}
	}
	t.Logf("%d cycles, %d steps compared with an uninterrupted run", cycles, len(got))
}

// processes measures a container's processes: what they occupy, files that they have open, threads.
func processes(t *testing.T, k *harness.Container) (f footprint) {
	t.Helper()
	root, err := k.Pid(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for pids := []int{root}; len(pids) > 0; pids = pids[1:] {
		m, err := harness.ProcessMemory(pids[0])
		if err != nil {
			t.Fatal(err)
		}
		threads, err := harness.Threads(pids[0])
		if err != nil {
			t.Fatal(err)
		}
		files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pids[0]))
		if err != nil {
			t.Fatal(err)
		}
		f.memory += float64(m.PSS)
		f.threads += float64(len(threads))
		f.descriptors += float64(len(files))
		children, err := harness.Children(pids[0])
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, children...)
	}
	return f
}

// What the comparison rests on.
func TestDrift(t *testing.T) {
	for _, test := range []struct {
		values []float64
		want   float64
	}{
		{[]float64{100, 100, 100, 100, 100, 100, 100, 100}, 0},
		{[]float64{100, 100, 900, 100, 100, 100, 100, 100}, 0}, // one of them does not make it
		{[]float64{100, 101, 102, 103, 104, 105, 106, 110}, 110.0/101 - 1},
		{[]float64{200, 200, 100, 100}, -0.5},
	} {
		if got := drift(test.values); math.Abs(got-test.want) > 1e-9 {
			t.Errorf("drift(%v) is %v, want %v", test.values, got, test.want)
		}
	}
}
