// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package workloads

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	ctdimages "github.com/containerd/containerd/v2/core/images"
	"golang.org/x/sync/semaphore"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/workloads/hostroot"
	"github.com/gpuckpt/gpuckpt/integration/workloads/programs"
)

const (
	workFile = "/tmp/steps" // where it writes them, in the container's own layer
	rounds   = 3            // of checkpoint, kill and restore
)

// envSteps is how many steps each workload takes, 200 if it is not set.
const envSteps = "GPUCKPT_TEST_STEPS"

// usualSteps is how many steps the programs' limits allow time for.
const usualSteps = 200

// workSteps is how many steps each workload takes.
var workSteps = usualSteps

// readSteps sets workSteps by the environment.
func readSteps() error {
	text := os.Getenv(envSteps)
	if text == "" {
		return nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 50 {
		return fmt.Errorf("%s is %q, not a number of 50 or more", envSteps, text)
	}
	workSteps = n
	return nil
}

// pauseOf is how many seconds there are between two steps of one that is checkpointed. However few steps there
// are, they must not all be made while the checkpoint's gigabytes are removed after a restore.
func pauseOf(p programs.Program, steps int) string {
	return fmt.Sprint(max(12, 0.6*float64(p.Host)) / float64(min(steps, usualSteps)))
}

// limitOf bounds a test of a program, with time for the steps beyond the usual ones.
func limitOf(p programs.Program) time.Duration {
	return p.Limit + time.Duration(max(0, workSteps-usualSteps))*500*time.Millisecond
}

// Workloads run beside each other as far as these GiB allow: of a GPU, and of the machine's memory,
// in which their checkpoints are too. An H200 and its machine have somewhat more.
var (
	allGPURoom int64 = 130
	gpuRoom    *semaphore.Weighted
	hostRoom   = semaphore.NewWeighted(100)
)

// findRoom sets how much room there is on the first GPU.
func findRoom() {
	if len(gpu.Devices) > 0 {
		allGPURoom = min(allGPURoom, int64(gpu.Devices[0].Memory>>30)-2)
	}
	gpuRoom = semaphore.NewWeighted(allGPURoom)
}

// takeRoom waits until there is room for a test that runs beside others, and keeps it until the
// test's end.
func takeRoom(t *testing.T, gpu, host int64) {
	t.Helper()
	for _, room := range []struct {
		of   *semaphore.Weighted
		want int64
	}{{gpuRoom, min(gpu, allGPURoom)}, {hostRoom, host}} {
		if err := room.of.Acquire(t.Context(), room.want); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { room.of.Release(room.want) })
	}
}

// gpuOf returns how much room on the GPU a test of a program takes.
func gpuOf(p programs.Program) int64 {
	if p.Alone {
		return allGPURoom
	}
	return p.GPU
}

// A journey is what happens to a container between its begin and its end. It returns the container
// that then runs to the end.
type journey func(context.Context, *testing.T, *harness.TestResult, *harness.Container) *harness.Container

// Programs as people run them, with default settings: each is checkpointed, killed and restored
// three times in a row, and has the lines of a run that nobody interrupted. Or its checkpoint is
// refused, and it runs on and has them too.
func TestWorkloads(t *testing.T) {
	t.Parallel()
	for _, p := range chosen(t) {
		t.Run(p.Name, func(t *testing.T) {
			result := results.Add(t)
			needsPyTorch(t)
			needsModule(t, p.Module)
			if filepath.Ext(p.File) == ".cu" {
				needsNvcc(t)
			}
			t.Parallel()
			takeRoom(t, gpuOf(p), p.Host)
			ctx, cancel := context.WithTimeout(t.Context(), limitOf(p))
			defer cancel()
			journey := travel
			if withEnvInterposer() && strings.HasPrefix(p.WayRound, "the interposer") {
				p.Refused = nil
			}
			if p.Refused != nil {
				journey = refused(p.Refused...)
			}
			compare(ctx, t, result, journey, true, p)
			if p.Refused == nil {
				wantGPUState(t, result)
			}
		})
	}
}

// envPart is which part of the programs TestWorkloads runs, "1/2" for every other one from the first on.
const envPart = "GPUCKPT_TEST_WORKLOADS"

// chosen are the programs of this part. A part has some of those that take long, as each has.
func chosen(t *testing.T) (part []programs.Program) {
	t.Helper()
	k, n := 1, 1
	if text := os.Getenv(envPart); text != "" {
		if _, err := fmt.Sscanf(text, "%d/%d", &k, &n); err != nil || k < 1 || k > n {
			t.Fatalf("%s=%s is no part such as 1/2", envPart, text)
		}
	}
	for i, p := range programs.List {
		if i%n == k-1 {
			part = append(part, p)
		}
	}
	t.Logf("%d of %d programs; all of them took 320 s on an H200 and 16 cores", len(part), len(programs.List))
	return part
}

// Python's multiprocessing alone, on any machine: its pools, queue and semaphores come back.
func TestMultiprocessing(t *testing.T) {
	result := results.Add(t)
	needsPython(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	compare(ctx, t, result, travel, false, programs.Program{File: "processes.py", Args: []string{"--device", "none"}})
}

// A kernel such as Jupyter's without its GPU: its sockets and those of its client, TCP within the
// container, go on.
func TestNotebook(t *testing.T) {
	result := results.Add(t)
	needsPython(t)
	needsModule(t, "zmq")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	compare(ctx, t, result, travel, false, programs.Program{File: "notebook.py", Args: []string{"--device", "none"}, Connected: true})
}

// What is on its way between two processes, in queues that are full, comes back.
func TestStreams(t *testing.T) {
	result := results.Add(t)
	needsPython(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	compare(ctx, t, result, travel, false, programs.Program{File: "streams.py", Connected: true})
}

// Where CRIU cannot keep packets away, a checkpoint is refused that has data to send within the container: CRIU would
// fail to restore it.
func TestUnsent(t *testing.T) {
	result := results.Add(t)
	needsPython(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	shared.Configured(t, "[criu.options]\nnetwork-lock = \"skip\"\n")
	p := programs.Program{File: "streams.py", Connected: true}
	compare(ctx, t, result, refused("not sent yet", "iptables"), false, p)
}

// compare runs a workload twice, one of them with a journey, and compares their steps. Both run at
// once, which saves a minute where a program takes long to begin.
func compare(ctx context.Context, t *testing.T, result *harness.TestResult, travel journey, cuda bool, p programs.Program) {
	t.Helper()
	args := append(slices.Clone(p.Args), "--steps", strconv.Itoa(workSteps), "--file", workFile)
	spec := specOf(p)
	spec.ID = harness.Name(t) + "-whole"
	whole := start(t, cuda, spec, p.File, args...)
	skipUnable(ctx, t, whole)
	var want record
	if p.Alone {
		want = finished(ctx, t, whole)
		whole.MustRemove(t)
	}
	spec.ID = harness.Name(t)
	k := start(t, cuda, spec, p.File, append(args, "--pause", pauseOf(p, workSteps))...)
	defer func() {
		if t.Failed() {
			t.Logf("the shim's log says of it:\n%s", tail(linesWith(shared.Log(), k.ID)))
		}
	}()

	got := finished(ctx, t, travel(ctx, t, result, k))
	if !p.Alone {
		want = finished(ctx, t, whole)
	}
	if !slices.Equal(got.steps, want.steps) {
		t.Errorf("the steps are not those of an uninterrupted run: %s", difference(got.steps, want.steps))
	}
	if got.digest != want.digest {
		t.Errorf("the digest is %s, that of an uninterrupted run %s", got.digest, want.digest)
	}
	t.Logf("%d steps and digest %s compared with an uninterrupted run", len(got.steps), got.digest)
	result.Number("steps_count", float64(workSteps))
}

// skipUnable waits for a program's first step, and skips the test of one that ends and says that this
// machine lacks what it needs: workload.py's skip.
func skipUnable(ctx context.Context, t *testing.T, k *harness.Container) {
	t.Helper()
	unable := func() string {
		_, why, _ := strings.Cut("\n"+k.Logs(), "\nskipped: ")
		return why
	}
	for ctx.Err() == nil && unable() == "" && parse(t, k.Logs()).last() == 0 {
		if status, err := k.Status(ctx); err != nil || status != client.Running {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if why := unable(); why != "" {
		t.Skip(why)
	}
}

// linesWith returns the lines that have a word.
func linesWith(text, word string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if strings.Contains(line, word) {
			b.WriteString(line)
		}
	}
	return b.String()
}

// travel checkpoints, kills and restores a container three times in a row, each time from the
// checkpoint before, and returns the last.
func travel(ctx context.Context, t *testing.T, result *harness.TestResult, k *harness.Container) *harness.Container {
	t.Helper()
	var killed string // the output of all before
	var restored string
	for round := range rounds {
		output := func() record { return parse(t, strings.TrimPrefix(k.Logs(), killed)) }
		at := workSteps * (round + 1) / (rounds + 2)
		await(ctx, t, k, fmt.Sprintf("step %d", at), func() bool { return output().last() >= at })
		before := output().last()
		needsSteps(t, before)
		ref := fmt.Sprintf("checkpoint.test/%s:%d", harness.Name(t), round+1)
		checkpointAs(ctx, t, result, k, ref)
		k.MustRemove(t)
		killed = k.Logs()
		if restored != "" {
			forgetImage(ctx, t, restored) // which takes seconds, in which the program would make steps
		}

		k = restoreWithin(ctx, t, result, k, ref)
		await(ctx, t, k, fmt.Sprintf("a step after restore %d", round+1), func() bool { return output().last() > 0 })
		if first := output().steps[0].number; first <= before {
			t.Fatalf("restore %d began with step %d; its checkpoint was taken after step %d", round+1, first, before)
		}
		t.Logf("round %d: checkpoint after step %d, restored and running", round+1, before)
		result.Number("rounds_count", float64(round+1))
		restored = ref
	}
	forgetImage(ctx, t, restored)
	return k
}

// needsSteps fails for a program that has made its last step: once restored, it would write nothing.
func needsSteps(t *testing.T, made int) {
	t.Helper()
	if made >= workSteps {
		t.Fatalf("all %d steps were made before the checkpoint: give it more than %d (%s)", made, max(made, usualSteps), envSteps)
	}
}

// forgetImage removes an image of which all that is to be restored has been: it may have gigabytes
// of memory.
func forgetImage(ctx context.Context, t *testing.T, ref string) {
	t.Helper()
	if err := shared.Client().ImageService().Delete(ctx, ref, ctdimages.SynchronousDelete()); err != nil {
		t.Fatal(err)
	}
}

// refused is a journey on which a checkpoint is refused, after which the container runs on.
func refused(words ...string) journey {
	return func(ctx context.Context, t *testing.T, _ *harness.TestResult, k *harness.Container) *harness.Container {
		t.Helper()
		await(ctx, t, k, "the first steps", func() bool { return parse(t, k.Logs()).last() >= workSteps/5 })
		for round := range rounds {
			harness.Says(t, k.Checkpoint(ctx, fmt.Sprintf("checkpoint.test/%s:%d", harness.Name(t), round+1)), words...)
			before := parse(t, k.Logs()).last()
			await(ctx, t, k, "a step after the refusal", func() bool {
				r := parse(t, k.Logs())
				return r.last() > before || r.digest != ""
			})
		}
		return k
	}
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
	if module == "" || module == "zmq" && os.Getenv(hostroot.EnvZMQ) != "" {
		return
	}
	const find = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
	if err := exec.CommandContext(t.Context(), host.Executable, "-c", find, module).Run(); err != nil {
		t.Skipf("%s has no module %s", host.Executable, module)
	}
}
