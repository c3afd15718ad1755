// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Compatibility writes docs/compatibility.md: what became of the programs that people run, as raw
// results of real GPUs have it (docs/results), and recipes.
//
//	compatibility [RESULTS [PAGE]]
//
// Of each test the latest result counts. `make compatibility` runs it, and a test fails while the
// committed page is another than the committed results make.
package main

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/workloads/programs"
)

// recipes are the parts of the page that no result makes.
//
//go:embed recipes.md
var recipes string

func main() {
	results, out := "../docs/results", "../docs/compatibility.md"
	if len(os.Args) > 1 {
		results = os.Args[1]
	}
	if len(os.Args) > 2 {
		out = os.Args[2]
	}
	if err := write(os.DirFS(results), out); err != nil {
		fmt.Fprintln(os.Stderr, "compatibility:", err)
		os.Exit(1)
	}
}

// write writes the page, and beside it the pictures.
func write(results fs.FS, out string) error {
	latest, err := read(results)
	if err != nil {
		return err
	}
	drawn, err := pictures(results, latest)
	if err != nil {
		return err
	}
	err = os.WriteFile(out, page(latest), 0o644)
	for name, picture := range drawn {
		err = errors.Join(err, os.WriteFile(filepath.Join(filepath.Dir(out), name), picture, 0o644))
	}
	return err
}

// outcome is a test's result and the run that it is of.
type outcome struct {
	*harness.TestResult
	run *harness.Results
	// file is the run's, below the directory of results.
	file string
}

// counts reports whether it says what became of the program.
func (o outcome) counts() bool {
	return o.passed() || o.Outcome == harness.Failed && apart[o.file] == ""
}

// date is when the run began: RFC 3339 in UTC, whose order is that of the texts; "" before all others.
func (o outcome) date() string {
	if apart[o.file] != "" {
		return ""
	}
	return o.run.Date
}

// passed reports whether there is a result and the test passed.
func (o outcome) passed() bool { return o.TestResult != nil && o.Outcome == harness.Passed }

// apart are results whose times and failures say nothing, and why: of them counts what passed and has no other result.
var apart = map[string]string{
	"2026-11-28-0f1a89e-h200-suites/workloads-first-answer-registry.json":      "ten test programs ran beside it on the other GPUs",
	"2026-11-28-0f1a89e-h200-suites/workloads-first-answer-tmpfs.json":         "ten test programs ran beside it on the other GPUs",
	"2026-11-28-f859d82-h100-suites/workloads-two-gpus.json":                   "some fifteen programs ran beside each other, and a limit was over",
	"2026-11-27-7d3d0fe-h100-four-gpus/workloads-not-swapped.json":             "others had their GPUs swapped",
	"2026-11-26-efeea8f-h200-four-gpus/workloads-swapped-cumem.json":           "the row is of two GPUs",
	"2026-11-26-efeea8f-h200-four-gpus/workloads-swapped-tensor-parallel.json": "the row is of two GPUs",
	"2026-11-24-d86a557-h200-gates/nccl-companion.json":                        "two ranks whose kernels wait for each other, on one GPU",
	"2026-11-23-140e6a4-h200-one-gpu/programs.json":                            "some thirty programs ran beside each other",
	"2026-11-23-140e6a4-h200-one-gpu/programs-cut-off.json":                    "the time was over before the last ones",
	"2026-11-23-2fa8161-h200-pods/programs.json":                               "two were cut off",
	"2026-11-23-cffe701-h200-two-gpus/programs.json":                           "the machine fuzzed meanwhile, and eight were cut off",
}

// read returns the latest outcome of each test on a real GPU, skipped tests left out. Kubernetes'
// have that word before their names.
func read(results fs.FS) (map[string]outcome, error) {
	files, err := fs.Glob(results, "*/*.json")
	if err != nil {
		return nil, err
	}
	latest := make(map[string]outcome)
	for _, file := range files {
		run, err := readRun(results, file)
		if err != nil {
			return nil, err
		}
		if run == nil || run.GPUKind != harness.RealGPU || len(run.GPUs) == 0 {
			continue
		}
		prefix := ""
		if strings.HasPrefix(path.Base(file), "kubernetes") {
			prefix = "kubernetes/"
		}
		for _, test := range run.Tests {
			name := prefix + test.Name
			// A swap is the same journey, between two GPUs; a refusal, and a bandwidth, have tests of their own.
			name = strings.NewReplacer(swapped, workloads, "TestRefusedOverNVLink/", workloads, "TestBandwidth", workloads+"nccl-bandwidth").Replace(name)
			// The interposer's name until November 2026.
			name = strings.Replace(name, "-companion", "-interposer", 1)
			o := outcome{test, run, file}
			// A program that has it by its own annotation has one row.
			if o.interposed() && (strings.HasPrefix(name, "TestFirstAnswer/") || plain(strings.TrimPrefix(name, workloads))) {
				name += interposed
			}
			if known, ok := latest[name]; o.counts() && (!ok || known.date() < o.date()) {
				latest[name] = o
			}
		}
	}
	return latest, nil
}

// plain reports whether a program of that name has no interposer of its own.
func plain(name string) bool {
	return slices.ContainsFunc(programs.List, func(p programs.Program) bool { return p.Name == name && p.Annotations == nil })
}

// readRun reads the results of a run of tests; nil where the file has others, such as the benchmark's.
func readRun(results fs.FS, file string) (*harness.Results, error) {
	data, err := fs.ReadFile(results, file)
	if err != nil {
		return nil, err
	}
	var has map[string]json.RawMessage
	if err := json.Unmarshal(data, &has); err != nil || has["tests"] == nil || has["gpuKind"] == nil {
		return nil, nil //nolint:nilerr // or it is no object
	}
	run := new(harness.Results)
	if err := json.Unmarshal(data, run); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return run, nil
}

// The tests of programs: each has the name of one behind it.
const workloads, swapped = "TestWorkloads/", "TestSwapped/"

// page is the document.
func page(latest map[string]outcome) []byte {
	var b bytes.Buffer
	b.WriteString(head)
	var refused, notRun []programs.Program
	b.WriteString("\n## Programs that travel\n\n" + tableHead)
	for _, p := range programs.List {
		switch o := latest[workloads+p.Name]; {
		case o.TestResult == nil:
			notRun = append(notRun, p)
		case p.Refused != nil:
			refused = append(refused, p)
		default:
			row(&b, p, o, latest[workloads+p.Name+interposed], latest["kubernetes/TestPrograms/"+p.Name])
		}
	}
	b.WriteString(features)
	b.WriteString("\n## Refused, and the program runs on\n\n| program | result | way round | GPU, driver | results |\n|---|---|---|---|---|\n")
	for _, p := range refused {
		o := latest[workloads+p.Name]
		result := "**not as it should be**"
		if o.passed() {
			result = "refused, runs on"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", p.What, result, p.WayRound, machine(o.run), link(o))
	}
	measured(&b, latest)
	if len(notRun) > 0 {
		b.WriteString("\n## Not run yet\n\nThese have a test and no raw result.\n\n| program | source |\n|---|---|\n")
		for _, p := range notRun {
			fmt.Fprintf(&b, "| %s | [%s](../integration/workloads/programs/%s) |\n", p.What, p.Name, p.File)
		}
	}
	b.WriteString("\n" + recipes)
	return b.Bytes()
}

const head = `# Compatibility

<!-- Written by make compatibility out of docs/results. Do not edit. -->

What became of programs as people run them, with default settings, on real GPUs.
Each program was checkpointed, killed and restored three times in a row. It then had the lines and
the digest of a run that nobody interrupted. Each line follows from the whole state of the program,
so one lost bit shows. [Their sources](../integration/workloads/programs) are short;
[change-it.md](internals/change-it.md#on-a-machine-with-a-gpu) runs them.
`

const tableHead = `| program | result | GPU state | image | checkpoint | restore | kubelet | GPU, driver | results | with the interposer |
|---|---|---|---|---|---|---|---|---|---|
`

const features = `
- "Checkpoint" and "restore" are the shim's times, in the last round. Some ten programs ran at once,
  so one alone takes less. ` + "`ctr`" + ` takes longer: it writes the image twice, and unpacks it.
- "Image" is CRIU's files and GPU state. Host memory is most of it.
- "CUDA C" is streams, events, textures, surfaces, the device's heap, cooperative launches, VMM, and
  mapped and registered host memory. It also is pools, graphs with host nodes, variables, constants.
`

// row writes what became of a program that is to travel: as it is, with the interposer, and in a pod.
func row(b *bytes.Buffer, p programs.Program, o, with, kubelet outcome) {
	result, byKubelet, byInterposer := "**fails**", "not run", "not run"
	switch {
	case p.Annotations != nil:
		byInterposer = "as said"
	case with.TestResult != nil:
		byInterposer = "[" + map[bool]string{true: "same", false: "**fails**"}[with.passed()] + "](results/" + with.file + ")"
	}
	if o.passed() {
		result = "same"
	}
	if strings.HasPrefix(o.Name, swapped) {
		result += ", GPUs swapped"
	}
	if kubelet.TestResult != nil {
		byKubelet = map[bool]string{true: "same", false: "**fails**"}[kubelet.passed()]
	}
	var state float64
	for name, bytes := range o.Numbers {
		if strings.HasPrefix(name, "process") && strings.HasSuffix(name, "_gpu_state_bytes") {
			state += bytes
		}
	}
	image := o.Numbers["image_bytes"]
	if state == 0 && image == 0 { // a checkpoint into a directory
		state, image = o.Numbers["checkpoint/save_GPU_state_bytes"], o.Numbers["checkpoint/dump_bytes"]
	}
	fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s | %s | %s | %s | %s |\n", p.What, result, size(state), size(image),
		seconds(o.Times["checkpoint/whole"]), seconds(o.Times["restore/whole"]), byKubelet, machine(o.run), link(o), byInterposer)
}

// measured writes what tests other than the programs' own have found.
func measured(b *bytes.Buffer, latest map[string]outcome) {
	if o := latest["TestServer"]; o.passed() {
		b.WriteString("\n## A server under load\n\nA server of Llama 3 8B's shape was checkpointed with `--leave-running`, suspended and resumed while\n" +
			"requests came in, then killed and restored three times. Its answers are those of a server that\n" +
			"nobody interrupted.\n\n" +
			"| requests | failed | longest | suspend | resume | checkpoint | restore | results |\n|---|---|---|---|---|---|---|---|\n")
		fmt.Fprintf(b, "| %.0f | 0 | %s | %s | %s | %s | %s | %s |\n", o.Numbers["requests_count"], seconds(o.Numbers["longest_request_seconds"]),
			seconds(o.Times["suspend"]), seconds(o.Times["resume"]), seconds(o.Times["checkpoint/whole"]), seconds(o.Times["restore/whole"]), link(o))
	}
	for _, server := range []struct{ test, what string }{
		{"TestBatching", "a server with continuous batching and paged attention, of Hugging Face's\ntransformers"},
		{"TestLlamaServer", "llama.cpp's server, with a model of 16 GB"},
	} {
		o := latest[server.test]
		if !o.passed() {
			continue
		}
		fmt.Fprintf(b, "\nEight clients asked %s.\nLeft running, it failed no request. In three rounds of checkpoint, end and restore %.0f\n"+
			"connections were closed, and all %.0f answers were right\n(%s).\n",
			server.what, o.Numbers["requests_failed_count"], o.Numbers["requests_answered_count"], link(o))
		if cold := o.Numbers["cold_answer_seconds"]; cold > 0 {
			fmt.Fprintf(b, "The first of the eight was answered %s after the restore began, which took %s. A cold start\n"+
				"answers one alone after %s.\n", seconds(o.Numbers["first_answer_seconds"]), seconds(o.Times["restore/whole"]), seconds(cold))
		}
	}
	if found := waits(latest); len(found) > 0 {
		b.WriteString("\n## The first answer\n\nA server of Hugging Face's `generate()`, of that shape, until its first answer\n([picture](first-answer.svg)):\n\n" +
			"| images on | GPU memory | images | first answer | GPU, driver | results |\n|---|---|---|---|---|---|\n")
		for _, w := range found {
			medium := w.medium
			if w.by != "" {
				medium += ", by " + w.by
			}
			if w.o.interposed() {
				medium += interposed
			}
			fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s |\n", medium, size(w.o.Numbers["gpu_bytes"]), size(w.o.Numbers["image_bytes"]),
				seconds(w.o.Numbers[w.number]), machine(w.o.run), link(w.o))
		}
		b.WriteString("\nThe registry is on a loopback port, and the node has nothing of the image. The time begins with the\n" +
			"pull.\n")
	}
	if o := latest["TestCycles"]; o.passed() {
		b.WriteString("\n## Again and again\n\nThe training with DataLoader's workers was checkpointed and restored many times in a row. The table\n" +
			"compares the median of the last quarter of the rounds with that of the first.\n\n" +
			"| rounds | refused, tried again | memory | descriptors | threads | image | GPU state | results |\n|---|---|---|---|---|---|---|---|\n")
		fmt.Fprintf(b, "| %.0f | %.0f |", o.Numbers["cycles_count"], o.Numbers["refusals_count"])
		for _, what := range []string{"memory_bytes", "descriptors_count", "threads_count", "image_bytes", "gpu_bytes"} {
			fmt.Fprintf(b, " %+.1f %% |", 100*o.Numbers[what+"_drift_ratio"])
		}
		fmt.Fprintf(b, " %s |\n", link(o))
	}
}

// size is bytes for people.
func size(bytes float64) string {
	switch {
	case bytes == 0:
		return ""
	case bytes < 1e9:
		return fmt.Sprintf("%.0f MB", bytes/1e6)
	default:
		return fmt.Sprintf("%.1f GB", bytes/1e9)
	}
}

// seconds is a time for people.
func seconds(s float64) string {
	if s == 0 {
		return ""
	}
	return fmt.Sprintf("%.1f s", s)
}

// machine is a run's GPU and driver.
func machine(run *harness.Results) string {
	return strings.TrimPrefix(run.GPUs[0].Name, "NVIDIA ") + ", " + run.Driver
}

// link is a link to an outcome's file.
func link(o outcome) string {
	return fmt.Sprintf("[%s](results/%s)", strings.TrimSuffix(path.Base(o.file), ".json"), o.file)
}
