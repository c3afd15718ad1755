// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pytorch

import (
	"context"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

const (
	workSteps = 200          // of each workload
	workFile  = "/tmp/steps" // where it writes them, in the container's own layer
	workPause = "0.04"       // seconds between two steps of one that is checkpointed
	rounds    = 3            // of checkpoint, kill and restore
)

// A journey is what happens to a container between its begin and its end. It returns the container
// that then runs to the end.
type journey func(context.Context, *testing.T, *harness.TestResult, *harness.Container) *harness.Container

// Programs as people run them, with default settings: each is checkpointed, killed and restored
// three times in a row, and has the lines of a run that nobody interrupted.
func TestWorkloads(t *testing.T) {
	for _, w := range []struct {
		name, program string
		module        string // that the program needs beside PyTorch
		limit         time.Duration
		travel        journey
	}{
		{"dataloader", "dataloader.py", "", 2 * time.Minute, travel},
		{"compile", "compiled.py", "", 4 * time.Minute, travel},
		{"multiprocessing", "processes.py", "", 2 * time.Minute, travel},
		{"jax", "jax_training.py", "jax", 2 * time.Minute, travel},
		{"nvml", "nvml_monitor.py", "pynvml", 2 * time.Minute, travel},
		{"ipc", "cuda_ipc.py", "", 2 * time.Minute, refusedForIPC},
	} {
		t.Run(w.name, func(t *testing.T) {
			result := results.Add(t)
			needsPyTorch(t)
			needsModule(t, w.module)
			ctx, cancel := context.WithTimeout(t.Context(), w.limit)
			defer cancel()
			compare(ctx, t, result, w.travel, true, w.program)
			if w.name != "ipc" {
				wantGPUState(t, result)
			}
		})
	}
}

// Python's multiprocessing alone, on any machine: its pools, queue and semaphores come back.
func TestMultiprocessing(t *testing.T) {
	result := results.Add(t)
	needsPython(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	compare(ctx, t, result, travel, false, "processes.py", "--device", "none")
}

// compare runs a workload twice, one of them with travel, and compares their steps. Both run at
// once, which saves a minute where a program takes long to begin.
func compare(ctx context.Context, t *testing.T, result *harness.TestResult, travel journey, cuda bool, program string, args ...string) {
	t.Helper()
	args = append(args, "--steps", strconv.Itoa(workSteps), "--file", workFile)
	whole := start(t, cuda, harness.RunSpec{ID: harness.Name(t) + "-whole"}, program, args...)
	k := start(t, cuda, harness.RunSpec{ID: harness.Name(t)}, program, append(args, "--pause", workPause)...)
	defer func() {
		if t.Failed() {
			t.Logf("the shim's log ends with:\n%s", tail(shared.Log()))
		}
	}()

	got := finished(ctx, t, travel(ctx, t, result, k))
	want := finished(ctx, t, whole)
	if !slices.Equal(got.steps, want.steps) {
		t.Errorf("the steps are not those of an uninterrupted run: %s", difference(got.steps, want.steps))
	}
	if got.digest != want.digest {
		t.Errorf("the digest is %s, that of an uninterrupted run %s", got.digest, want.digest)
	}
	t.Logf("%d steps and digest %s compared with an uninterrupted run", len(got.steps), got.digest)
	result.Number("steps_count", workSteps)
}

// travel checkpoints, kills and restores a container three times in a row, each time from the
// checkpoint before, and returns the last.
func travel(ctx context.Context, t *testing.T, result *harness.TestResult, k *harness.Container) *harness.Container {
	t.Helper()
	var killed string // the output of all before
	for round := range rounds {
		output := func() record { return parse(t, strings.TrimPrefix(k.Logs(), killed)) }
		at := workSteps * (round + 1) / (rounds + 2)
		await(ctx, t, k, fmt.Sprintf("step %d", at), func() bool { return output().last() >= at })
		before := output().last()
		ref := fmt.Sprintf("checkpoint.test/%s:%d", harness.Name(t), round+1)
		checkpointAs(ctx, t, result, k, ref)
		k.MustRemove(t)
		killed = k.Logs()

		k = restoreWithin(ctx, t, result, k, ref)
		await(ctx, t, k, fmt.Sprintf("a step after restore %d", round+1), func() bool { return output().last() > 0 })
		if first := output().steps[0].number; first <= before {
			t.Fatalf("restore %d began with step %d; its checkpoint was taken after step %d", round+1, first, before)
		}
		t.Logf("round %d: checkpoint after step %d, restored and running", round+1, before)
	}
	return k
}

// refusedForIPC has a checkpoint refused, after which the container runs on.
func refusedForIPC(ctx context.Context, t *testing.T, _ *harness.TestResult, k *harness.Container) *harness.Container {
	t.Helper()
	await(ctx, t, k, "the first steps", func() bool { return parse(t, k.Logs()).last() >= workSteps/5 })
	harness.Says(t, k.Checkpoint(ctx, "checkpoint.test/"+harness.Name(t)+":1"), "CUDA IPC")
	return k
}

// finished waits for the end of a workload and returns its record: the steps of its file, which
// has each step once if the file and the memory are of one moment.
func finished(ctx context.Context, t *testing.T, k *harness.Container) record {
	t.Helper()
	digest := func() string { return parse(t, k.Logs()).digest }
	var r record
	await(ctx, t, k, k.ID+" ends", func() bool {
		if digest() == "" {
			return false
		}
		r = parse(t, readFile(t, k, workFile))
		return r.last() >= workSteps
	})
	r.digest = digest()
	values := map[string]bool{}
	for i, s := range r.steps {
		if s.number != i+1 {
			t.Fatalf("%s: step %d comes as number %d", k.ID, s.number, i+1)
		}
		values[s.loss] = true
	}
	if len(r.steps) != workSteps || len(values) < workSteps/2 {
		t.Fatalf("%s: %d steps with %d different values, want %d steps", k.ID, len(r.steps), len(values), workSteps)
	}
	return r
}

// needsModule skips a test where Python lacks a module; "" is none.
func needsModule(t *testing.T, module string) {
	t.Helper()
	if module == "" {
		return
	}
	const find = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
	if err := exec.CommandContext(t.Context(), host.Executable, "-c", find, module).Run(); err != nil {
		t.Skipf("%s has no module %s", host.Executable, module)
	}
}
