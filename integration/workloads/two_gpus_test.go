// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package workloads

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/typeurl/v2"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/workloads/programs"
)

// envGPUs is over how many GPUs programs run that run over several.
const envGPUs = "GPUCKPT_TEST_GPUS"

// ranks is envGPUs' value, by default 2.
func ranks(t *testing.T) int { return wanted(t, envGPUs, 2) }

// needsGPUs skips a test where PyTorch has less than the programs' ranks.
func needsGPUs(t *testing.T) {
	t.Helper()
	needsPyTorch(t)
	if n := ranks(t); len(gpu.Devices) < n {
		t.Skipf("this machine has %d GPU, the test needs %d", len(gpu.Devices), n)
	}
}

// Ranks with a GPU each are checkpointed, ended and restored, each on the next one's GPU, three
// times. Their steps are those of a run that nobody interrupted.
func TestSwapped(t *testing.T) {
	t.Parallel()
	for _, p := range programs.List {
		if !p.Alone || p.Refused != nil {
			continue
		}
		t.Run(p.Name, func(t *testing.T) {
			result := results.Add(t)
			needsGPUs(t)
			needsModule(t, p.Module)
			t.Parallel()
			takeRoom(t, gpuOf(p), p.Host)
			ctx, cancel := context.WithTimeout(t.Context(), limitOf(p))
			defer cancel()
			compare(ctx, t, result, swap, true, p)
		})
	}
}

// swap is a journey on which the container's GPUs change places at each restore, in a ring.
func swap(ctx context.Context, t *testing.T, result *harness.TestResult, k *harness.Container) *harness.Container {
	t.Helper()
	var pairs []string
	for i, n := 0, ranks(t); i < n; i++ {
		pairs = append(pairs, gpu.Devices[i].UUID+"="+gpu.Devices[(i+1)%n].UUID)
	}
	annotate(ctx, t, k, cdi.PairsAnnotation, strings.Join(pairs, ","))
	steps := func() int { return parse(t, readFile(t, k, workFile)).last() }
	await(ctx, t, k, "the first steps", func() bool { return parse(t, k.Logs()).last() > 0 }) // then there is the file
	memory := memoryDir(t)
	for round := range rounds {
		at := workSteps * (round + 1) / (rounds + 2)
		await(ctx, t, k, fmt.Sprintf("step %d", at), func() bool { return steps() >= at })
		before, on := steps(), gpusOf(ctx, t, k)
		needsSteps(t, before)
		dir := filepath.Join(memory, strconv.Itoa(round))
		if err := result.Time("checkpoint", func() error { checkpointInto(ctx, t, result, k, dir); return nil }); err != nil {
			t.Fatal(err)
		}
		notePhases(t, result, k)
		endTask(ctx, t, k)
		if err := result.Time("restore", func() error { restoreFrom(ctx, t, k, dir); return nil }); err != nil {
			t.Fatal(err)
		}
		notePhases(t, result, k)
		await(ctx, t, k, fmt.Sprintf("a step after restore %d", round+1), func() bool { return steps() > before+1 })
		result.Number("swapped_processes_count", float64(wantSwapped(t, on, gpusOf(ctx, t, k))))
		t.Log(linesWith(linesWith(shared.Log(), "id="+k.ID+" "), "GPU pairs"))
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		t.Logf("round %d: checkpoint after step %d, restored with the GPUs swapped", round+1, before)
		result.Number("rounds_count", float64(round+1))
	}
	return k
}

// annotate adds an annotation to the spec of a container, for its next task.
func annotate(ctx context.Context, t *testing.T, k *harness.Container, name, value string) {
	t.Helper()
	container, err := shared.Client().LoadContainer(ctx, k.ID)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := container.Spec(ctx)
	if err != nil {
		t.Fatal(err)
	}
	spec.Annotations = maps.Clone(spec.Annotations)
	if spec.Annotations == nil {
		spec.Annotations = map[string]string{}
	}
	spec.Annotations[name] = value
	if err := container.Update(ctx, func(_ context.Context, _ *client.Client, c *containers.Container) (err error) {
		c.Spec, err = typeurl.MarshalAnyToProto(spec)
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// gpusOf returns the GPUs of a container's processes, by PID in the container: what nvidia-smi says. A process that
// it does not list is left out.
func gpusOf(ctx context.Context, t *testing.T, k *harness.Container) map[string][]string {
	t.Helper()
	root, err := k.Pid(ctx)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(ctx, "nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader").Output()
	if err != nil {
		t.Logf("nvidia-smi does not say which processes are on which GPU: %v", err)
		return nil
	}
	on := map[string][]string{}
	for pids := []int{root}; len(pids) > 0; pids = pids[1:] {
		names, err := harness.StatusField(pids[0], "NSpid")
		if err != nil {
			t.Fatal(err)
		}
		fields := strings.Fields(names)
		for line := range strings.Lines(string(out)) {
			pid, uuid, _ := strings.Cut(strings.TrimSpace(line), ", ")
			if inside := fields[len(fields)-1]; pid == strconv.Itoa(pids[0]) && !slices.Contains(on[inside], uuid) {
				on[inside] = append(on[inside], uuid)
			}
		}
		children, err := harness.Children(pids[0])
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, children...)
	}
	return on
}

// wantSwapped checks that each process that was on one GPU is on the other one, and returns how many of them
// nvidia-smi listed both times.
func wantSwapped(t *testing.T, before, after map[string][]string) (seen int) {
	t.Helper()
	for pid, was := range before {
		is := after[pid]
		if len(was) != 1 || len(is) != 1 {
			t.Logf("process %s was on %v and is on %v: not compared", pid, was, is)
			continue
		}
		seen++
		if is[0] == was[0] {
			t.Errorf("process %s is on %s, as before", pid, is[0])
		}
	}
	return seen
}

// Ranks that share GPU memory over NVLink, and a process that reaches one GPU's memory from another, without the interposer: each checkpoint that is asked for is
// refused, and the program has the steps of a run that nobody disturbed. GPUCKPT_TEST_RANKS is how many.
func TestRefusedOverNVLink(t *testing.T) {
	for _, name := range []string{"nccl-cumem", "nccl-ipc", "jax-two-gpus"} {
		t.Run(name, func(t *testing.T) {
			result := results.Add(t)
			needsGPUs(t)
			if withEnvInterposer() {
				t.Skipf("%s is set", envInterposer)
			}
			p := programs.Named(name)
			takeRoom(t, gpuOf(p), p.Host)
			tries := triesWanted(t, 10)
			ctx, cancel := context.WithTimeout(t.Context(), limitOf(p)+time.Duration(tries)*3*time.Second)
			defer cancel()
			compare(ctx, t, result, refusedOften(tries, p.Refused...), true, p)
		})
	}
}

// refusedOften is a journey on which a checkpoint of the task alone, which is quick, is refused as often as that.
func refusedOften(tries int, words ...string) journey {
	return func(ctx context.Context, t *testing.T, result *harness.TestResult, k *harness.Container) *harness.Container {
		t.Helper()
		await(ctx, t, k, "the first steps", func() bool { return parse(t, k.Logs()).last() >= 10 })
		var longest, all time.Duration
		for range tries {
			began := time.Now()
			_, err := k.CheckpointTask(ctx, harness.TaskCheckpoint{ImagePath: t.TempDir()})
			took := time.Since(began)
			if err != nil && strings.Contains(err.Error(), "try again") && !strings.Contains(err.Error(), words[0]) {
				t.Logf("refused for something that passes: %v", err)
				result.Count("passing_refusals_count")
				continue
			}
			harness.Says(t, err, words...)
			longest, all = max(longest, took), all+took
			result.Count("refusals_count")
		}
		t.Logf("%d refusals up to step %d, the longest in %v, on average in %v", tries, parse(t, k.Logs()).last(), longest, all/time.Duration(tries))
		result.Number("longest_refusal_seconds", longest.Seconds())
		result.Number("mean_refusal_seconds", (all / time.Duration(tries)).Seconds())
		before := parse(t, k.Logs()).last()
		await(ctx, t, k, "a step after the refusals", func() bool {
			r := parse(t, k.Logs())
			return r.last() > before || r.digest != ""
		})
		return k
	}
}

// The bus bandwidth of an all-reduce over NVLink before a checkpoint and after three restores goes into
// the results. No speed fails the test.
func TestBandwidth(t *testing.T) {
	result := results.Add(t)
	needsGPUs(t)
	p := programs.Named("nccl-bandwidth")
	takeRoom(t, gpuOf(p), p.Host)
	ctx, cancel := context.WithTimeout(t.Context(), limitOf(p))
	defer cancel()
	spec := specOf(p)
	spec.ID = harness.Name(t)
	// Nothing else is to be on the GPUs: its sums are compared in TestWorkloads.
	k := start(t, true, spec, p.File, slices.Concat(p.Args, []string{"--steps", strconv.Itoa(workSteps), "--file", workFile, "--pause", pauseOf(p, workSteps)})...)
	skipUnable(ctx, t, k)
	finished(ctx, t, travel(ctx, t, result, k))
	rates := bandwidths(t, k.Logs())
	part := workSteps / (rounds + 2) // the first checkpoint comes after these, the last restore before as many at the end
	if len(rates) < 2*part {
		t.Fatalf("%d lines of bandwidth, want about %d", len(rates), workSteps)
	}
	before, after := median(rates[1:part]), median(rates[len(rates)-part:])
	t.Logf("bus bandwidth: %.1f GB/s before the checkpoint, %.1f GB/s after the last restore", before, after)
	result.Number("allreduce_before_gigabytes_per_second", before)
	result.Number("allreduce_after_gigabytes_per_second", after)
	result.Number("allreduce_bandwidth_ratio", after/before)
}

// bandwidths are those of the lines "bandwidth GB/s" of a program's output, in their order.
func bandwidths(t *testing.T, output string) (rates []float64) {
	t.Helper()
	for line := range strings.Lines(output) {
		text, ok := strings.CutPrefix(line, "bandwidth ")
		if !ok || !strings.HasSuffix(text, "\n") {
			continue
		}
		rate, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
		if err != nil {
			t.Fatalf("the program wrote %q: %v", line, err)
		}
		rates = append(rates, rate)
	}
	return rates
}

// median is the one in the middle, the higher of two.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}

// What the measurement rests on.
func TestBandwidths(t *testing.T) {
	got := bandwidths(t, "# NCCL 2\nbandwidth 330.25\nstep 1 a-b\nbandwidth 329\nbandwidth 32")
	if !slices.Equal(got, []float64{330.25, 329}) || median(append(got, 1)) != 329 {
		t.Errorf("parsed as %v", got)
	}
}
