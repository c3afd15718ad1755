// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package gpus tests that a container goes on on other GPUs than it was
// checkpointed on: other indices, more of them, in another order; and that what
// cannot work is refused. On real GPUs where there are any, else on the
// software GPU (GPUCKPT_GPU chooses). What needs two GPUs is skipped where there
// is one.
package gpus

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

var (
	shared  *harness.Containerd
	bins    harness.Bins
	gpu     harness.GPU
	results *harness.Results
)

// image has the workloads, and the host's nvidia-smi with a real GPU.
const image = "gpuckpt.test/gpus:latest"

// imageSMI is where: a CDI specification mounts the host's own over
// /usr/bin/nvidia-smi, and the image need not have the loader that it wants.
const imageSMI = "/usr/bin/image-nvidia-smi"

func TestMain(m *testing.M) {
	os.Exit(harness.Interruptible(func(ctx context.Context) int { return run(ctx, m) }))
}

func run(ctx context.Context, m *testing.M) (code int) {
	fail := func(err error) int {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	var err error
	if bins, err = harness.FindBins(); err != nil {
		return fail(fmt.Errorf("%w; run `make test`", err))
	}
	if gpu, err = harness.DetectGPU(bins); err != nil {
		return fail(err)
	}
	fmt.Printf("GPU: %s, driver %s, %d device(s)\n", gpu.Kind, gpu.Driver, len(gpu.Devices))
	results = harness.NewResults(ctx, bins, gpu)
	if shared, err = harness.Start(ctx, harness.Options{Bins: bins, GPU: gpu, Dir: os.Getenv("GPUCKPT_TEST_DIR")}); err != nil {
		return fail(err)
	}
	defer func() {
		if err := shared.Stop(); err != nil {
			code = fail(err)
		}
	}()
	if err := prepare(ctx); err != nil {
		return fail(err)
	}
	code = m.Run()
	path, err := results.Write()
	if err != nil {
		return fail(err)
	}
	if path != "" {
		fmt.Println("results:", path)
	}
	return code
}

// prepare makes the image and configures the shim: nothing that it leaves is to
// outlive the tests, and the machine's own CDI specifications are not for them.
func prepare(ctx context.Context) error {
	program, err := bins.Path("gpuwork")
	if err != nil {
		return err
	}
	files := map[string]string{"/usr/bin/gpuwork": program}
	if smi, err := exec.LookPath("nvidia-smi"); err == nil && gpu.Kind == harness.RealGPU {
		if files[imageSMI], err = filepath.EvalSymlinks(smi); err != nil {
			return fmt.Errorf("find nvidia-smi: %w", err)
		}
	}
	img, err := harness.BuildImage(ctx, harness.ImageSpec{
		Files: files, Guests: gpu.LibraryFiles(), Entrypoint: []string{"/usr/bin/gpuwork"},
	})
	if err != nil {
		return err
	}
	if err := shared.Import(ctx, image, img); err != nil {
		return err
	}
	if err := os.Mkdir(cdiDir(), 0o755); err != nil {
		return err
	}
	return shared.SetShimConfig(fmt.Sprintf("log_dir = %q\ncdi_spec_dirs = [%q]\n[staging]\ncgroup = %q\n",
		filepath.Join(shared.Dir(), "criu-logs"), cdiDir(), filepath.Join(shared.Namespace(), "staging")))
}

// cdiDir is where the shim looks for CDI specifications.
func cdiDir() string { return filepath.Join(shared.Dir(), "cdi") }

// two skips a test that needs two GPUs where there is one.
func two(t *testing.T) *harness.TestResult {
	t.Helper()
	result := results.Add(t)
	if len(gpu.Devices) < 2 {
		t.Skipf("this machine has %d GPU, the test needs two", len(gpu.Devices))
	}
	return result
}

// software skips a test of what a real GPU cannot be told, and tells the
// software GPU until the test ends.
func software(t *testing.T, lines string) {
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

func uuid(index int) string { return gpu.Devices[index].UUID }
