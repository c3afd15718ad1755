// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// The digests of a restore are compared from its creation on. A container that is created and never
// started lets go of all of it when it is deleted; one whose checkpoint changes until it is started
// is refused. A second container keeps the shim alive, which would otherwise let go of everything.
func TestCreatedOnly(t *testing.T) {
	results.Add(t)
	var ks []*harness.Container
	for i := range 2 {
		k := shared.Work(t, harness.RunSpec{
			ID: fmt.Sprintf("%s-%d", harness.Name(t), i), GPUs: []int{0},
			Annotations: map[string]string{"io.containerd.runc.v2.group": harness.Name(t)},
		}, "counter")
		k.Expect(t, "count", "101")
		ks = append(ks, k)
	}
	shim := shimOf(t, ks[1])
	dir := t.TempDir()
	checkpointInto(t, shared, ks[0], dir)
	endTask(t, shared, ks[0])

	task := createRestore(t, ks[0], dir)
	if holds(t, shim, dir) == 0 {
		t.Error("the shim does not hold the checkpoint of a container that was created")
	}
	gone := func() bool { return childOf(shim, "gpuckpt-digester") == 0 }
	harness.Within(t, "the digester of a container that was created does not end", gone)
	if _, err := task.Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := holds(t, shim, dir); n > 0 {
		t.Errorf("the shim holds the checkpoint of a container that was deleted, %d times", n)
	}
	helperGone := func() bool { return childOf(shim, "gpuckpt-cuda-helper") == 0 }
	harness.Within(t, "the CUDA helper of a container that was deleted does not end", helperGone)

	task = createRestore(t, ks[0], dir)
	harness.Within(t, "the digester of a container that was created does not end", gone)
	state, err := filepath.Glob(filepath.Join(dir, "gpu-*"))
	if err != nil || len(state) == 0 {
		t.Fatalf("GPU state: %v, %v", state, err)
	}
	harness.FlipBit(t, state[0])
	harness.Says(t, task.Start(t.Context()), "is damaged: block ")
	if _, err := task.Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	harness.FlipBit(t, state[0])
	if err := createRestore(t, ks[0], dir).Start(t.Context()); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(4000))
	}
	ks[0].Expect(t, "count", "102")
	ks[1].Expect(t, "count", "102")
}

// createRestore creates a task of a container that is to go on from a checkpoint.
func createRestore(t *testing.T, k *harness.Container, dir string) client.Task {
	t.Helper()
	container, err := shared.Client().LoadContainer(t.Context(), k.ID)
	if err != nil {
		t.Fatal(err)
	}
	output := cio.LogFile(filepath.Join(shared.Dir(), "logs", k.ID+".log"))
	task, err := container.NewTask(t.Context(), output, client.WithRestoreImagePath(dir))
	if err != nil {
		t.Fatal(err)
	}
	return task
}

// holds returns how many descriptors a process has of a directory.
func holds(t *testing.T, pid int, dir string) (held int) {
	t.Helper()
	want, err := os.Stat(dir)
	if err != nil {
		t.Fatal(err)
	}
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if is, err := os.Stat(fd); err == nil && os.SameFile(is, want) {
			held++
		}
	}
	return held
}
