// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package suspend tests "gpuckpt suspend" and "gpuckpt resume" end to end, and
// stock clients beside them, in a private containerd, on a real GPU where there
// is one and on the software GPU elsewhere (GPUCKPT_GPU chooses).
package suspend

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

var (
	// shared serves every test that needs nothing special of its containerd.
	shared *harness.Containerd
	// session ends when the tests are interrupted.
	session context.Context
	bins    harness.Bins
	gpu     harness.GPU
	results *harness.Results
)

func TestMain(m *testing.M) {
	os.Exit(harness.Interruptible(func(ctx context.Context) int { return run(ctx, m) }))
}

func run(ctx context.Context, m *testing.M) (code int) {
	var err error
	session = ctx
	if bins, err = harness.FindBins(); err != nil {
		fmt.Fprintf(os.Stderr, "%v; run `make test`\n", err)
		return 1
	}
	if gpu, err = harness.DetectGPU(bins); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Printf("GPU: %s, driver %s, %d device(s)\n", gpu.Kind, gpu.Driver, len(gpu.Devices))
	results = harness.NewResults(ctx, bins, gpu)
	if shared, err = newContainerd(ctx, harness.Options{}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code = m.Run()
	if err := shared.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	path, err := results.Write()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if path != "" {
		fmt.Println("results:", path)
	}
	return code
}

// newContainerd starts one with the workload's image in it.
func newContainerd(ctx context.Context, opts harness.Options) (*harness.Containerd, error) {
	opts.Bins, opts.GPU = bins, gpu
	opts.Dir = os.Getenv("GPUCKPT_TEST_DIR")
	c, err := harness.Start(ctx, opts)
	if err != nil {
		return nil, err
	}
	if err := c.ImportWorkload(ctx); err != nil {
		return nil, err
	}
	return c, configure(c, "")
}

// configure sets the shim's configuration, with settings for [staging]. What
// shims leave on the machine goes with the containerd.
func configure(c *harness.Containerd, staging string) error {
	return c.SetShimConfig(fmt.Sprintf("log_dir = %q\n[staging]\ncgroup = %q\n%s\n",
		filepath.Join(c.Dir(), "criu-logs"), stagingCgroup(c), staging))
}

// stagingCgroup is what memory for GPU state is charged to.
func stagingCgroup(c *harness.Containerd) string { return filepath.Join(c.Namespace(), "staging") }

// staging sets [staging] of the shared containerd until the test ends.
func staging(t *testing.T, settings string) {
	t.Helper()
	if err := configure(shared, settings); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := configure(shared, ""); err != nil {
			t.Error(err)
		}
	})
}

// softwareGPU tells the software GPU what to do differently until the test
// ends. A real GPU cannot be told: the test is skipped.
func softwareGPU(t *testing.T, lines string) {
	t.Helper()
	if gpu.Kind != harness.SoftwareGPU {
		t.Skip("only the software GPU can be told to: " + lines)
	}
	if err := shared.SetSoftwareGPU(lines); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := shared.SetSoftwareGPU(""); err != nil {
			t.Error(err)
		}
	})
}

// own starts a containerd for one test.
func own(t *testing.T, opts harness.Options) *harness.Containerd {
	t.Helper()
	c, err := newContainerd(session, opts) // t.Context() ends before what is in it can be removed
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// id makes a container's name of the test's.
func id(t *testing.T) string {
	return strings.NewReplacer("/", "-", "_", "-", " ", "-").Replace(strings.ToLower(t.Name()))
}
