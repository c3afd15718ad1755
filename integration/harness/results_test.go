// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// ended is a test that has ended somehow.
type ended struct {
	name            string
	failed, skipped bool
	cleanups        []func()
}

func (e *ended) Name() string     { return e.name }
func (e *ended) Failed() bool     { return e.failed }
func (e *ended) Skipped() bool    { return e.skipped }
func (e *ended) Cleanup(f func()) { e.cleanups = append(e.cleanups, f) }
func (e *ended) end() {
	for _, f := range e.cleanups {
		f()
	}
}

func TestResults(t *testing.T) {
	path := filepath.Join(t.TempDir(), "results.json")
	t.Setenv(EnvResults, path)
	t.Setenv(EnvCommit, "0123abc")
	gpu := GPU{Kind: SoftwareGPU, Driver: "580.0", Devices: []GPUDevice{{UUID: "GPU-1", Name: "One", Memory: 1 << 30}}}
	r := NewResults(t.Context(), Bins{}, gpu)
	failure := errors.New("no")
	for _, test := range []*ended{{name: "TestA"}, {name: "TestB", failed: true}, {name: "TestC", skipped: true}} {
		result := r.Add(test)
		if err := result.Time("dump", func() error { return failure }); !errors.Is(err, failure) {
			t.Errorf("Time returns %v", err)
		}
		result.Number("image_bytes", 42)
		test.end()
	}
	if got, err := r.Write(); got != path || err != nil {
		t.Fatalf("Write: %q, error %v", got, err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var got Results
	if err := json.Unmarshal(data, &got); err != nil {
		t.Fatal(err)
	}
	if got.Commit != "0123abc" || got.GPUKind != SoftwareGPU || got.Driver != "580.0" || got.Kernel == "" || got.CgroupVersion == 0 {
		t.Errorf("results of %+v", &got)
	}
	if len(got.GPUs) != 1 || got.GPUs[0] != (ResultGPU{Name: "One", UUID: "GPU-1", Memory: 1 << 30}) {
		t.Errorf("GPUs %+v", got.GPUs)
	}
	if _, err := time.Parse(time.RFC3339, got.Date); err != nil {
		t.Error(err)
	}
	if len(got.Tests) != 3 {
		t.Fatalf("%d tests, want 3", len(got.Tests))
	}
	for i, want := range []string{Passed, Failed, Skipped} {
		test := got.Tests[i]
		if _, timed := test.Times["dump"]; test.Outcome != want || !timed || test.Numbers["image_bytes"] != 42 || test.Seconds < 0 {
			t.Errorf("test %+v, want %s", test, want)
		}
	}
	if left, err := filepath.Glob(path + ".*"); len(left) != 0 || err != nil {
		t.Errorf("temporary files left: %v, error %v", left, err)
	}
}

func TestResultsPath(t *testing.T) {
	t.Setenv(EnvResults, "")
	t.Setenv("OUT", "")
	r := NewResults(t.Context(), Bins{}, GPU{})
	if path, err := r.Write(); path != "" || err != nil {
		t.Errorf("nowhere to write: %q, error %v", path, err)
	}
	dir := t.TempDir()
	t.Setenv("OUT", dir)
	if path, err := r.Write(); path != filepath.Join(dir, "results.json") || err != nil {
		t.Errorf("with OUT: %q, error %v", path, err)
	}
}
