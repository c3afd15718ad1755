// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpus

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// bytes is the GPU memory of each pattern, on each of its GPUs.
const bytes = 24 << 20

// start runs a workload of gpuwork with the image of these tests.
func start(t *testing.T, spec harness.RunSpec, args ...string) *harness.Container {
	t.Helper()
	spec.Image = image
	return shared.Work(t, spec, args...)
}

// checkpointed takes a checkpoint of a container into a directory and removes
// the container.
func checkpointed(t *testing.T, result *harness.TestResult, k *harness.Container) (dir string) {
	t.Helper()
	dir = t.TempDir()
	if err := checkpointInto(t, k, dir); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(4000))
	}
	result.Phases(t, k)
	k.MustRemove(t)
	return dir
}

func checkpointInto(t *testing.T, k *harness.Container, dir string) error {
	t.Helper()
	opts, err := typeurl.MarshalAnyToProto(&options.CheckpointOptions{ImagePath: dir})
	if err != nil {
		t.Fatal(err)
	}
	_, err = shared.Client().TaskService().Checkpoint(t.Context(), &tasks.CheckpointTaskRequest{ContainerID: k.ID, Options: opts})
	return err
}

// metadata reads the gpuckpt.json of a checkpoint.
func metadata(t *testing.T, dir string) *images.Metadata {
	t.Helper()
	m, err := images.ReadMetadata(dir)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// tryRestore makes a new container with a spec of its own, whose processes go
// on from a checkpoint, as a client does that knows what the container is to
// get now. It is removed when the test ends.
func tryRestore(t *testing.T, spec harness.RunSpec, dir string, port int) (*harness.Container, error) {
	t.Helper()
	spec.ID, spec.Image, spec.Port, spec.Args = harness.Name(t), image, port, []string{"gpuwork", "sleep"}
	k, err := shared.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	k.RemoveAtEnd(t)
	container, err := shared.Client().LoadContainer(t.Context(), k.ID)
	if err != nil {
		t.Fatal(err)
	}
	task, err := container.NewTask(t.Context(), cio.LogFile(filepath.Join(shared.Dir(), "logs", k.ID+".log")), client.WithRestoreImagePath(dir))
	if err != nil {
		return k, err
	}
	return k, task.Start(t.Context())
}

func restored(t *testing.T, result *harness.TestResult, spec harness.RunSpec, dir string, port int) *harness.Container {
	t.Helper()
	k, err := tryRestore(t, spec, dir, port)
	if err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(6000))
	}
	result.Phases(t, k)
	for line := range strings.Lines(shared.LogTail(6000)) {
		if strings.Contains(line, "id="+k.ID+" ") && strings.Contains(line, "GPU pairs taken") {
			t.Log(strings.TrimSpace(line)) // which pairs a real driver takes is not documented
		}
	}
	return k
}

// refused restores with a spec that will not do, and checks that the error has
// the words, is a failed precondition, and that nothing was made.
func refused(t *testing.T, spec harness.RunSpec, dir string, words ...string) {
	t.Helper()
	k, err := tryRestore(t, spec, dir, 0)
	if err == nil {
		t.Fatalf("no error, want one that says %q", words)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("the error does not say %q:\n%v", word, err)
		}
	}
	if !errdefs.IsFailedPrecondition(err) {
		t.Errorf("the error is no failed precondition: %v", err)
	}
	t.Logf("refused, as it should be: %v", err)
	if status, err := k.Status(t.Context()); !errdefs.IsNotFound(err) {
		t.Errorf("a task is left: %q, error %v", status, err)
	}
	if _, err := os.Stat(shared.Bundle(k.ID)); !os.IsNotExist(err) {
		t.Errorf("the bundle is left: %v", err)
	}
	if err := k.Remove(t.Context()); err != nil {
		t.Error(err)
	}
}

// isOn checks on which GPUs the nth program is, by its own word.
func isOn(t *testing.T, k *harness.Container, n int, uuids ...string) {
	t.Helper()
	info := strings.Fields(k.Process(n).Answer(t, "info")) // pid=1 bytes=… gpus=1 GPU-… 0x…
	if got := info[3 : 3+len(uuids)]; info[2] != fmt.Sprintf("gpus=%d", len(uuids)) || !slices.Equal(got, uuids) {
		t.Errorf("process %d is on %v, want %v", n, info[2:], uuids)
	}
}

// execIn runs a program in a container to its end and gives what it printed.
func execIn(t *testing.T, k *harness.Container, name string, args ...string) string {
	t.Helper()
	out, err := shared.Ctr(t.Context(), execWords(k, name, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// tryIn runs a program in a container that may fail.
func tryIn(t *testing.T, k *harness.Container, name string, args ...string) error {
	t.Helper()
	_, err := shared.Ctr(t.Context(), execWords(k, name, args...)...)
	return err
}

func execWords(k *harness.Container, name string, args ...string) []string {
	return append([]string{"tasks", "exec", "--fifo-dir", filepath.Join(shared.Dir(), "fifo"), "--exec-id", name, k.ID}, args...)
}

// visible checks what a newcomer finds in a container: NVML shows the GPUs of
// these indices and no others, and CUDA works on each.
func visible(t *testing.T, k *harness.Container, indices ...int) {
	t.Helper()
	lists := map[string]string{"gpuwork list": execIn(t, k, "list", "gpuwork", "list")}
	if _, err := os.Stat(inside(t, k, imageSMI)); err == nil {
		lists["nvidia-smi -L"] = execIn(t, k, "smi", imageSMI, "-L")
	}
	tried := execIn(t, k, "try", "gpuwork", "try")
	for name, text := range lists {
		t.Logf("%s in the container:\n%s", name, strings.TrimSpace(text))
	}
	for i := range gpu.Devices {
		want := slices.Contains(indices, i)
		for name, text := range lists {
			if strings.Contains(text, uuid(i)) != want {
				t.Errorf("%s shows %s: %v, want %v", name, uuid(i), !want, want)
			}
		}
		if strings.Contains(tried, "ok "+uuid(i)) != want {
			t.Errorf("a new CUDA process works on %s: %v, want %v: %s", uuid(i), !want, want, tried)
		}
	}
}

// hasNodes checks which GPUs' nodes a container has. With a real GPU there may
// be nodes of others: NVIDIA's libraries make one of every GPU where they may
// (CAP_MKNOD). Those cannot be opened.
func hasNodes(t *testing.T, k *harness.Container, indices ...int) {
	t.Helper()
	paths, err := filepath.Glob(inside(t, k, "/dev/nvidia[0-9]*"))
	if err != nil {
		t.Fatal(err)
	}
	there := map[string]bool{}
	for _, path := range paths {
		there["/dev/"+filepath.Base(path)] = true
	}
	for i := range gpu.Devices {
		node := gpuNode(t, i)
		granted := slices.Contains(indices, i)
		if granted != there[node.Path] && (granted || gpu.Kind == harness.SoftwareGPU) {
			t.Errorf("%s is in the container: %v, want %v", node.Path, !granted, granted)
		}
		if !there[node.Path] {
			continue
		}
		var st unix.Stat_t
		if err := unix.Stat(inside(t, k, node.Path), &st); err != nil {
			t.Fatal(err)
		}
		if major, minor := int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev)); major != node.Major || minor != node.Minor {
			t.Errorf("%s is device %d:%d, want %d:%d", node.Path, major, minor, node.Major, node.Minor)
		}
		if granted {
			continue
		}
		err := tryIn(t, k, fmt.Sprintf("open-%d", i), "gpuwork", "plain", "--open", node.Path)
		if err == nil || !strings.Contains(err.Error(), "Operation not permitted") {
			t.Errorf("%s, which is not granted, was opened: %v", node.Path, err)
		}
	}
}
