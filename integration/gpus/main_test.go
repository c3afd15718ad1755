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
	// shared serves every test that needs nothing special of its containerd.
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
	harness.Main(m.Run, func(s *harness.Session) (err error) {
		bins, gpu, results = s.Bins, s.GPU, s.Results
		if shared, err = s.Start(harness.Options{}); err != nil {
			return err
		}
		return prepare(s.Context())
	})
}

// prepare makes the image and configures the shim: the machine's own CDI
// specifications are not for the tests.
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
	return shared.ConfigureShim(fmt.Sprintf("cdi_spec_dirs = [%q]\n", cdiDir()))
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

func uuid(index int) string { return gpu.Devices[index].UUID }
