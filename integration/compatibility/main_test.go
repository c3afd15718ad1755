// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"testing/fstest"
)

// The page and its pictures are what the results make.
func TestCommitted(t *testing.T) {
	results := os.DirFS("../../docs/results")
	latest, err := read(results)
	if err != nil {
		t.Fatal(err)
	}
	files, err := pictures(results, latest)
	if err != nil {
		t.Fatal(err)
	}
	files["compatibility.md"] = page(latest)
	for file, want := range files {
		got, err := os.ReadFile("../../docs/" + file)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("docs/%s is not what docs/results make: run `make compatibility`", file)
		}
	}
}

// results makes a file of one test.
func results(date, kind, test, outcome string) *fstest.MapFile {
	return &fstest.MapFile{Data: []byte(`{"date": "` + date + `", "gpuKind": "` + kind + `", "driver": "580.1",
		"gpus": [{"name": "NVIDIA H200"}],
		"tests": [{"name": "` + test + `", "outcome": "` + outcome + `", "times": {"checkpoint/whole": 1.234},
			"numbers": {"image_bytes": 3e9, "process0_gpu_state_bytes": 4e8, "process1_gpu_state_bytes": 5e8,
				"cold_answer_seconds": 25, "first_answer_seconds": 3.2, "first_answer_by_stock_seconds": 4.8}}]}`)}
}

// line returns the line of the page that begins so.
func line(t *testing.T, files fstest.MapFS, begin string) string {
	t.Helper()
	latest, err := read(files)
	if err != nil {
		t.Fatal(err)
	}
	for l := range strings.Lines(string(page(latest))) {
		if strings.HasPrefix(l, begin) {
			return strings.TrimSpace(l)
		}
	}
	return ""
}

// The latest result of a test counts, that of another kind of GPU or of a skipped test does not.
func TestPage(t *testing.T) {
	const jax, name = "| JAX in training", "TestWorkloads/jax"
	files := fstest.MapFS{"a/workloads.json": results("2026-01-02T00:00:00Z", "real", name, "failed")}
	if got := line(t, files, jax); !strings.Contains(got, "**fails**") {
		t.Errorf("of a failure it says %q", got)
	}
	files["b/workloads.json"] = results("2026-01-03T00:00:00Z", "real", name, "passed")
	want := jax + " | same | 900 MB | 3.0 GB | 1.2 s |  | not run | H200, 580.1 | [workloads](results/b/workloads.json) | not run |"
	if got := line(t, files, jax); got != want {
		t.Errorf("it says\n%q, want\n%q", got, want)
	}
	files["b/workloads-interposer.json"] = results("2026-01-05T00:00:00Z", "real", name, "passed")
	want = strings.TrimSuffix(want, "not run |") + "[same](results/b/workloads-interposer.json) |"
	if got := line(t, files, jax); got != want {
		t.Errorf("with the interposer it says\n%q, want\n%q", got, want)
	}
	files["c/workloads.json"] = results("2026-01-04T00:00:00Z", "software", name, "failed")
	files["d/workloads.json"] = results("2026-01-04T00:00:00Z", "real", name, "skipped")
	if got := line(t, files, jax); got != want {
		t.Errorf("after results that do not count it says\n%q", got)
	}
	files["e/kubernetes.json"] = results("2026-01-01T00:00:00Z", "real", "TestPrograms/jax", "passed")
	if got := line(t, files, jax); !strings.Contains(got, "| 1.2 s |  | same | H200") {
		t.Errorf("with the kubelet it says\n%q", got)
	}
	files["f/bench.json"] = &fstest.MapFile{Data: []byte(`[1]`)}
	files["g/other.json"] = results("2026-01-04T12:00:00Z", "real", name, "failed")
	if got := line(t, files, jax); !strings.Contains(got, "**fails**") {
		t.Errorf("of a failure in a file of another name it says %q", got)
	}
	delete(files, "g/other.json")
	files["h/workloads.json"] = results("2026-01-05T00:00:00Z", "real", "TestSwapped/jax", "passed")
	if got := line(t, files, jax); !strings.HasPrefix(got, jax+" | same, GPUs swapped | ") {
		t.Errorf("of a swap it says %q", got)
	}
	delete(files, "h/workloads.json")
	delete(files, "b/workloads.json")
	files["a/workloads.json"] = results("2026-01-02T00:00:00Z", "real", "TestWorkloads/managed", "passed")
	if got := line(t, files, "| managed"); !strings.Contains(got, "refused, runs on") {
		t.Errorf("of a refusal it says %q", got)
	}
	files["a/refused.json"] = results("2026-01-02T00:00:00Z", "real", "TestRefusedOverNVLink/nccl-ipc", "passed")
	if got := line(t, files, "| DDP, NCCL with two ranks over NVLink, by CUDA IPC |"); !strings.Contains(got, "refused, runs on") {
		t.Errorf("of a refusal over NVLink it says %q", got)
	}
	files["f/workloads.json"] = results("2026-01-02T00:00:00Z", "real", "TestFirstAnswer/transformers-tmpfs", "passed")
	if got := line(t, files, "| tmpfs |"); !strings.Contains(got, "| 3.0 GB | 3.2 s |") {
		t.Errorf("of the first answer it says %q", got)
	}
	if got := line(t, files, "| registry"); got != "" {
		t.Errorf("of a registry that was not tried it says %q", got)
	}
	files["g/workloads.json"] = results("2026-01-02T00:00:00Z", "real", "TestFirstAnswer/transformers-registry", "passed")
	if got := line(t, files, "| registry, by `ctr images pull`"); !strings.Contains(got, "| 3.0 GB | 4.8 s |") {
		t.Errorf("of the first answer from a registry it says %q", got)
	}
	latest, err := read(files)
	if err != nil {
		t.Fatal(err)
	}
	if got := string(picture(latest)); !strings.Contains(got, `class="cold"`) || !strings.Contains(got, ">25.0 s<") || strings.Count(got, `class="bar"`) != 2 {
		t.Errorf("the picture is %s", got)
	}
	if got := line(t, files, jax); !strings.Contains(got, "jax_training.py") {
		t.Error("what has no result is not listed")
	}
}
