// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package workloads

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	ctdimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/workloads/hostroot"
	"github.com/gpuckpt/gpuckpt/integration/workloads/programs"
)

// nodes are the device nodes that PyTorch may open.
var nodes = []string{
	"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-caps/*",
}

// nodesHere are those of this machine.
func nodesHere(t *testing.T) (paths []string) {
	t.Helper()
	for _, pattern := range nodes {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		paths = append(paths, found...)
	}
	for _, d := range gpu.Devices {
		paths = append(paths, d.Path())
	}
	return paths
}

// importImage makes the image and puts it into the shared containerd, once, and
// gives what is to be mounted into containers made of it.
var importImage = sync.OnceValues(func() ([]specs.Mount, error) {
	root, err := hostroot.New(host, gpu)
	if err != nil {
		return nil, err
	}
	img, err := root.Image(context.Background())
	if err != nil {
		return nil, err
	}
	return root.Mounts, shared.Import(context.Background(), hostroot.ImageName, img)
})

// specOf is what a program needs of its container, which lacks a name.
func specOf(p programs.Program) harness.RunSpec {
	spec := harness.RunSpec{OwnNetwork: p.Connected, Annotations: p.Annotations}
	if p.Shm > 0 {
		spec.Amend = append(spec.Amend, oci.WithDevShmSize(p.Shm<<10))
	}
	return spec
}

// envInterposer, if set, gives all programs the interposer.
const envInterposer = "GPUCKPT_TEST_INTERPOSER"

func withEnvInterposer() bool { return os.Getenv(envInterposer) != "" }

// start runs one of the programs, or one of the machine's by its path, in a container of the host's Python, with the
// first GPU if cuda is set. It is removed when the test ends.
//
// The harness would give the container the driver's libraries file by file; here
// they come with the host's directories, where they may be behind links, and a
// mount onto a link is not where the spec says.
func start(t *testing.T, cuda bool, spec harness.RunSpec, program string, args ...string) *harness.Container {
	t.Helper()
	var err error
	if spec.Mounts, err = importImage(); err != nil {
		t.Fatal(err)
	}
	spec.Image = hostroot.ImageName
	if path.IsAbs(program) {
		spec.Args = append([]string{program}, args...)
	} else if path.Ext(program) == ".cu" {
		dir, err := compiled()
		if err != nil {
			t.Fatal(err)
		}
		spec.Mounts = append(slices.Clone(spec.Mounts), specs.Mount{Type: "bind", Source: dir, Destination: compiledDir, Options: []string{"bind", "ro", "rprivate"}})
		spec.Args = append([]string{path.Join(compiledDir, strings.TrimSuffix(program, ".cu"))}, args...)
	} else {
		spec.Args = append([]string{host.Executable, path.Join(hostroot.ProgramsDir, program)}, args...)
	}
	spec.Env = append(host.Env(gpu, cuda), fmt.Sprintf("RANKS=%d", ranks(t)))
	if cuda && withEnvInterposer() {
		spec.Annotations = maps.Clone(spec.Annotations)
		if spec.Annotations == nil {
			spec.Annotations = map[string]string{}
		}
		spec.Annotations[annotations.Interposer] = "true"
	}
	if cuda {
		for _, path := range nodesHere(t) {
			spec.CtrFlags = append(spec.CtrFlags, "--device", path)
		}
	}
	k, err := shared.Run(t.Context(), spec)
	if err != nil {
		t.Fatalf("%v\n%s", err, tail(shared.Log()))
	}
	k.RemoveAtEnd(t)
	return k
}

// checkpoint takes a checkpoint with ctr, notes its times and sizes, and gives
// the image's name.
func checkpoint(t *testing.T, result *harness.TestResult, k *harness.Container) (ref string) {
	t.Helper()
	ref = "checkpoint.test/" + harness.Name(t) + ":1"
	checkpointAs(t.Context(), t, result, k, ref)
	return ref
}

// checkpointAs is checkpoint to an image of that name. The image goes when the test
// ends: it has gigabytes.
func checkpointAs(ctx context.Context, t *testing.T, result *harness.TestResult, k *harness.Container, ref string) {
	t.Helper()
	if err := result.Time("checkpoint", func() error {
		return untilTaken(ctx, t, result, func() error { return k.Checkpoint(ctx, ref) })
	}); err != nil {
		t.Fatalf("%v\n%s", err, tail(shared.Log()))
	}
	forgetAtEnd(t, ref)
	notePhases(t, result, k)
	noteSizes(t, result, ref)
}

func forgetAtEnd(t *testing.T, ref string) {
	t.Cleanup(func() {
		if err := shared.Client().ImageService().Delete(context.Background(), ref, ctdimages.SynchronousDelete()); err != nil && !errdefs.IsNotFound(err) {
			t.Error(err)
		}
	})
}

// untilTaken takes a checkpoint, and again if it is refused for something that passes: a program that
// starts a process or makes a connection at that moment. The error says so. The container runs on
// meanwhile, and the results say how often that happened.
func untilTaken(ctx context.Context, t *testing.T, result *harness.TestResult, take func() error) error {
	t.Helper()
	for tries := 1; ; tries++ {
		err := take()
		if err == nil || tries == 5 || !strings.Contains(err.Error(), "try again") {
			return err
		}
		t.Logf("refused, and tried again: %v", err)
		result.Count("refusals_count")
		select {
		case <-ctx.Done():
			return err
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// restore restores a container of which nothing is left but its checkpoint.
func restore(t *testing.T, result *harness.TestResult, k *harness.Container, ref string) *harness.Container {
	t.Helper()
	return restoreWithin(t.Context(), t, result, k, ref)
}

func restoreWithin(ctx context.Context, t *testing.T, result *harness.TestResult, k *harness.Container, ref string) *harness.Container {
	t.Helper()
	var r *harness.Container
	if err := result.Time("restore", func() (err error) {
		r, err = shared.Restore(ctx, k.ID, ref, k.Port)
		return err
	}); err != nil {
		t.Fatalf("%v\n%s", err, tail(shared.Log()))
	}
	r.RemoveAtEnd(t)
	notePhases(t, result, r)
	return r
}

// readFile reads a file of a running container, through its process.
func readFile(t *testing.T, k *harness.Container, path string) string {
	t.Helper()
	pid, err := k.Pid(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/root%s", pid, path))
	if err != nil {
		t.Fatalf("%v; the container wrote:\n%s", err, words(k.Logs()))
	}
	return string(data)
}
