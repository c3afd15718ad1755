// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// EnvResults names the file that Results.Write writes.
const EnvResults = "GPUCKPT_RESULTS"

// EnvCommit is the commit under test, for a machine without the repository.
const EnvCommit = "GPUCKPT_COMMIT"

// Results is what a run of tests found, and on what. Its JSON is a published
// format: docs/results holds files of it.
type Results struct {
	// Date is when the run began, RFC 3339.
	Date   string `json:"date"`
	Commit string `json:"commit"`
	// GPUKind is "real", "software" or empty.
	GPUKind GPUKind     `json:"gpuKind"`
	Driver  string      `json:"driver"`
	GPUs    []ResultGPU `json:"gpus"`
	Kernel  string      `json:"kernel"`
	// CgroupVersion is 1 or 2.
	CgroupVersion int `json:"cgroupVersion"`
	// Versions are those of criu, containerd and runc as they print them.
	Versions map[string]string `json:"versions"`
	Tests    []*TestResult     `json:"tests"`

	mu sync.Mutex
}

// ResultGPU is one GPU of the run.
type ResultGPU struct {
	Name string `json:"name"`
	// UUID tells runs on the same GPU from others.
	UUID string `json:"uuid"`
	// Memory is in bytes.
	Memory uint64 `json:"memoryBytes"`
}

// The outcomes of a test.
const (
	Passed  = "passed"
	Failed  = "failed"
	Skipped = "skipped"
)

// TestResult is one test's outcome and what it measured. Its methods may be
// called from several goroutines.
type TestResult struct {
	Name    string `json:"name"`
	Outcome string `json:"outcome"`
	// Seconds is how long the test took, on the wall clock.
	Seconds float64 `json:"seconds"`
	// Times are the durations of its steps, in seconds, by name.
	Times map[string]float64 `json:"times,omitempty"`
	// Numbers are other measurements; their names end in the unit.
	Numbers map[string]float64 `json:"numbers,omitempty"`

	mu sync.Mutex
}

// Test is what Results needs of a *testing.T.
type Test interface {
	Name() string
	Failed() bool
	Skipped() bool
	Cleanup(func())
}

// NewResults notes the machine, the GPU and the programs' versions. A version
// that cannot be had is left out.
func NewResults(ctx context.Context, bins Bins, gpu GPU) *Results {
	r := &Results{
		Date:          time.Now().UTC().Format(time.RFC3339),
		Commit:        commit(ctx),
		GPUKind:       gpu.Kind,
		Driver:        gpu.Driver,
		GPUs:          []ResultGPU{},
		CgroupVersion: CgroupVersion(),
		Versions:      map[string]string{},
		Tests:         []*TestResult{},
	}
	for _, device := range gpu.Devices {
		r.GPUs = append(r.GPUs, ResultGPU{Name: device.Name, UUID: device.UUID, Memory: device.Memory})
	}
	var uts unix.Utsname
	if err := unix.Uname(&uts); err == nil {
		r.Kernel = unix.ByteSliceToString(uts.Release[:])
	}
	for _, name := range []string{"containerd", "runc", "criu"} {
		program, err := bins.Path(name)
		if err != nil {
			continue
		}
		if out, err := exec.CommandContext(ctx, program, "--version").Output(); err == nil {
			first, _, _ := strings.Cut(string(out), "\n")
			r.Versions[name] = strings.TrimSpace(first)
		}
	}
	return r
}

// commit is GPUCKPT_COMMIT, or the commit of the repository that this runs in,
// with "-dirty" where files differ from it; empty when there is none.
func commit(ctx context.Context) string {
	if commit := os.Getenv(EnvCommit); commit != "" {
		return commit
	}
	out, err := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

// Add enters a test; its outcome and time are noted when it ends.
func (r *Results) Add(t Test) *TestResult {
	result := &TestResult{Name: t.Name(), Times: map[string]float64{}, Numbers: map[string]float64{}}
	start := time.Now()
	r.mu.Lock()
	r.Tests = append(r.Tests, result)
	r.mu.Unlock()
	t.Cleanup(func() {
		result.mu.Lock()
		defer result.mu.Unlock()
		result.Seconds = time.Since(start).Seconds()
		switch {
		case t.Failed():
			result.Outcome = Failed
		case t.Skipped():
			result.Outcome = Skipped
		default:
			result.Outcome = Passed
		}
	})
	return result
}

// Time runs a step and notes how long it took, also when it fails.
func (t *TestResult) Time(step string, run func() error) error {
	start := time.Now()
	err := run()
	took := time.Since(start).Seconds()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.Times[step] = took
	return err
}

// Number notes a measurement; the name ends in its unit ("image_bytes").
func (t *TestResult) Number(name string, value float64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.Numbers[name] = value
}

// Count adds one to a measurement that counts.
func (t *TestResult) Count(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.Numbers[name]++
}

// Write writes the results, by rename, to the file that GPUCKPT_RESULTS names,
// else to results.json in the directory that OUT names, and returns its path;
// with neither set it writes nothing and returns an empty path. Call it when all
// tests have ended.
func (r *Results) Write() (string, error) {
	path := os.Getenv(EnvResults)
	if path == "" {
		dir := os.Getenv("OUT")
		if dir == "" {
			return "", nil
		}
		path = filepath.Join(dir, "results.json")
	}
	r.mu.Lock()
	data, err := json.MarshalIndent(r, "", "  ")
	r.mu.Unlock()
	if err != nil {
		return "", fmt.Errorf("write the results: %w", err)
	}
	temp, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".")
	if err != nil {
		return "", fmt.Errorf("write the results: %w", err)
	}
	_, err = temp.Write(append(data, '\n'))
	if err = errors.Join(err, temp.Chmod(0o644), temp.Close()); err == nil {
		err = os.Rename(temp.Name(), path)
	}
	if err != nil {
		return "", errors.Join(fmt.Errorf("write the results: %w", err), os.Remove(temp.Name()))
	}
	return path, nil
}
