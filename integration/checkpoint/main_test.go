// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package checkpoint tests the main job end to end: an unmodified ctr
// checkpoints and restores GPU containers through the shim, in a private
// containerd, on a real GPU where there is one and on the software GPU
// elsewhere (GPUCKPT_GPU chooses).
package checkpoint

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

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
	if left := unpacked(shared); len(left) > 0 {
		fmt.Fprintln(os.Stderr, "left by a checkpoint or restore:", left)
		code = 1
	}
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
	return c, configure(c, opts.ShimConfig)
}

// configure sets the shim's configuration. What a shim leaves on the machine,
// CRIU's logs and the cgroup of staging memory, is to go with the containerd.
func configure(c *harness.Containerd, toml string) error {
	if !strings.Contains(toml, "[staging]") {
		toml += staging(c, "staging", "")
	}
	return c.SetShimConfig(fmt.Sprintf("log_dir = %q\n%s", logDir(c), toml))
}

// staging is the section [staging], with a cgroup of that name inside the
// containerd's.
func staging(c *harness.Containerd, cgroup, settings string) string {
	return fmt.Sprintf("[staging]\ncgroup = %q\n%s\n", filepath.Join(c.Namespace(), cgroup), settings)
}

// logDir is where a shim keeps the logs of CRIU.
func logDir(c *harness.Containerd) string { return filepath.Join(c.Dir(), "criu-logs") }

// configured sets the shared containerd's shim configuration until the test
// ends, or until the function that it gives is called.
func configured(t *testing.T, toml string) (undo func()) {
	t.Helper()
	if err := configure(shared, toml); err != nil {
		t.Fatal(err)
	}
	undo = func() {
		if err := configure(shared, ""); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(undo)
	return undo
}

// softwareGPU tells the software GPU what to do differently, as configured
// does. A real GPU cannot be told: the test is skipped.
func softwareGPU(t *testing.T, lines string) (undo func()) {
	t.Helper()
	if gpu.Kind != harness.SoftwareGPU {
		t.Skip("only the software GPU can be told to: " + lines)
	}
	if err := shared.SetSoftwareGPU(lines); err != nil {
		t.Fatal(err)
	}
	undo = func() {
		if err := shared.SetSoftwareGPU(""); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(undo)
	return undo
}

// unpacked are the directories that containerd made for the images of single
// checkpoints and restores, and that are still there.
func unpacked(c *harness.Containerd) []string {
	left, _ := filepath.Glob(filepath.Join(c.Dir(), "tmp", "ctrd-checkpoint*")) // the pattern is sound
	return left
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

// start runs a workload of gpuwork with a port to ask it on. It is removed when
// the test ends.
func start(t *testing.T, c *harness.Containerd, spec harness.RunSpec, args ...string) *harness.Container {
	t.Helper()
	k := startForGood(t, c, spec, args...)
	removeAtEnd(t, k)
	return k
}

// startForGood is start without the removal.
func startForGood(t *testing.T, c *harness.Containerd, spec harness.RunSpec, args ...string) *harness.Container {
	t.Helper()
	if spec.Port == 0 {
		port, err := harness.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		spec.Port = port
	}
	if spec.ID == "" {
		spec.ID = id(t)
	}
	spec.Args = append(append([]string{"gpuwork"}, args...), "--port", strconv.Itoa(spec.Port))
	k, err := c.Run(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func removeAtEnd(t *testing.T, k *harness.Container) {
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := k.Remove(ctx); err != nil {
			t.Error(err)
		}
	})
}

// ask sends a question and gives the answer, or fails the test.
func ask(t *testing.T, k *harness.Container, question string) string {
	t.Helper()
	answer, err := k.Ask(t.Context(), question)
	if err != nil {
		t.Fatalf("%v\nits output: %s", err, k.Logs())
	}
	return answer
}

func expect(t *testing.T, k *harness.Container, question, want string) {
	t.Helper()
	if got := ask(t, k, question); got != want {
		t.Fatalf("%q: got %q, want %q", question, got, want)
	}
}

// kill ends a container and removes it, so that a restore can take its name.
func kill(t *testing.T, k *harness.Container) {
	t.Helper()
	if err := k.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// restore restores a checkpoint image, removed when the test ends.
func restore(t *testing.T, c *harness.Containerd, id, ref string, port int) *harness.Container {
	t.Helper()
	k, err := c.Restore(t.Context(), id, ref, port)
	if err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(3000))
	}
	removeAtEnd(t, k)
	return k
}
