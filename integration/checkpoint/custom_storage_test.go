// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// driver615 makes the software GPU's a driver with custom storage. No other that has it was at hand.
const driver615 = "driver=615.71-softcuda\ncuda=13040\n"

// withCustomStorage has a node use it until the test ends.
func withCustomStorage(t *testing.T, settings string) {
	t.Helper()
	results.Add(t)
	shared.SoftwareGPU(t, driver615)
	shared.Configured(t, harness.AnyCheckpoint+shared.Staging("staging", "custom_storage = true\n"+settings))
}

// isCustom fails the test unless a checkpoint is by custom storage.
func isCustom(t *testing.T, dir string) {
	t.Helper()
	m, err := images.ReadMetadata(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range m.Processes {
		if !p.CustomStorage || len(p.Areas) == 0 || slices.ContainsFunc(p.Areas, func(a images.Area) bool { return a.GPU == "" }) {
			t.Errorf("process %d has its GPU memory elsewhere: %+v", p.PID, p.Areas)
		}
	}
}

// GPU memory comes and goes by custom storage: of a program that is left running, and of one that ends. Its restored self is
// checkpointed as well. The driver's threads need not be steered, and the images may lie on a tmpfs.
func TestCustomStorage(t *testing.T) {
	for name, settings := range map[string]string{"steered": "", "unsteered": "steer = false"} {
		t.Run(name, func(t *testing.T) {
			withCustomStorage(t, settings)
			k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "72M", "--seed", "7")
			k.Expect(t, "verify", "bad=0")
			for _, parent := range []string{t.TempDir(), onTmpfs(t)} {
				left := filepath.Join(parent, "left")
				checkpointInto(t, shared, k, left)
				isCustom(t, left)
				goesOn(t, k)
				dir := filepath.Join(parent, "ended")
				if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: dir, Exit: true}); err != nil {
					t.Fatalf("%v\n%s", err, shared.LogTail(4000))
				}
				isCustom(t, dir)
				for _, from := range []string{dir, left} {
					endTask(t, shared, k)
					if err := restoreTask(t, shared, k, from); err != nil {
						t.Fatalf("%v\n%s", err, shared.LogTail(4000))
					}
					k.Expect(t, "verify", "bad=0")
				}
			}
			ref := takeCheckpoint(t, shared, k, "1")
			if m := metadataOf(t, shared, ref); m.SchemaVersion != images.LatestSchema || !m.HasCustomStorage() {
				t.Errorf("the image's metadata is of version %d: %+v", m.SchemaVersion, m.Processes)
			}
			k.MustRemove(t)
			r := restore(t, shared, k.ID, ref, k.Port)
			r.Expect(t, "verify", "bad=0")
			r.Expect(t, "write 500", "wrote 500")
			r.Expect(t, "verify", "bad=0")
		})
	}
}

// onTmpfs is a directory on a tmpfs.
func onTmpfs(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "gpuckpt-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// Two processes with a GPU each.
func TestCustomStorageOfTwo(t *testing.T) {
	withCustomStorage(t, "")
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0, 1}, Ports: 2}, "multi", "--procs", "2", "--gpus", "2", "--bytes", "8M")
	verify := func() {
		t.Helper()
		for n := range 2 {
			k.Process(n).Expect(t, "verify", "bad=0")
		}
	}
	verify()
	dir := t.TempDir()
	checkpointInto(t, shared, k, dir)
	isCustom(t, dir)
	verify()
	endTask(t, shared, k)
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(4000))
	}
	verify()
}

// A node whose driver has no custom storage refuses such a checkpoint before anything of the container exists, and so does one
// whose files were changed.
func TestCustomStorageRefused(t *testing.T) {
	withCustomStorage(t, "")
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "8M")
	k.Expect(t, "verify", "bad=0")
	dir := t.TempDir()
	checkpointInto(t, shared, k, dir)
	endTask(t, shared, k)
	shared.SoftwareGPU(t, driver615+"custom_storage=0\n")
	harness.Says(t, restoreTask(t, shared, k, dir), "custom storage (CUDA 13.4)", "615.71-softcuda", "restore it where the driver has it")
	nothingLeft(t, shared, k)
	shared.SoftwareGPU(t, driver615)
	area := filepath.Join(dir, images.AreaFile(1, 0))
	harness.FlipBit(t, area)
	failsToStart(t, k, dir, "digest")
	harness.FlipBit(t, area)
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(4000))
	}
	k.Expect(t, "verify", "bad=0")
}

// failsToStart wants a restore to fail when the task is started. Nothing of the container is left then.
func failsToStart(t *testing.T, k *harness.Container, dir string, words ...string) {
	t.Helper()
	harness.Says(t, restoreTask(t, shared, k, dir), words...)
	ctr(t, shared, "tasks", "delete", k.ID)
	nothingLeft(t, shared, k)
}

// Who copies dies in the middle of a checkpoint: it fails and says why, leaves nothing, and the program goes on with its
// memory, if the driver undoes the step as the software GPU does. The next checkpoint is good.
func TestCustomStorageMoverKilled(t *testing.T) {
	withCustomStorage(t, "")
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "24M")
	k.Expect(t, "verify", "bad=0")
	for _, exit := range []bool{false, true} {
		dir := t.TempDir()
		err := whileMapped(t, k, "", func(ctx context.Context) error {
			_, err := k.CheckpointTask(ctx, harness.TaskCheckpoint{ImagePath: dir, Exit: exit})
			return err
		})
		harness.Says(t, err, "save GPU state", "checkpoint CUDA process", "killed")
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("the checkpoint has left %v, %v", left, err)
		}
		goesOn(t, k)
	}
	dir := t.TempDir()
	checkpointInto(t, shared, k, dir)
	isCustom(t, dir)
	goesOn(t, k)
}

// whileMapped kills the mover when the driver has mapped memory there, which the software GPU has it copy slowly. more is
// what else the software GPU is told.
func whileMapped(t *testing.T, k *harness.Container, more string, do func(context.Context) error) error {
	t.Helper()
	shared.SoftwareGPU(t, driver615+"out_delay_ms=1000\n"+more)
	defer func() { shared.SoftwareGPU(t, driver615+more) }()
	done := make(chan error, 1)
	go func() { done <- do(t.Context()) }()
	shim, pid := shimOf(t, k), 0
	harness.Within(t, "the copy", func() bool {
		pid = mover(t, shim)
		return pid != 0
	})
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	return <-done
}

// A driver that refuses a step leaves the program running, or the checkpoint as it was.
func TestCustomStorageDriverFails(t *testing.T) {
	withCustomStorage(t, "")
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "24M")
	k.Expect(t, "verify", "bad=0")
	shared.SoftwareGPU(t, driver615+"fail=checkpoint:2:1\n")
	_, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: t.TempDir()})
	harness.Says(t, err, "checkpoint CUDA process", "CUDA_ERROR_OUT_OF_MEMORY")
	shared.SoftwareGPU(t, driver615)
	goesOn(t, k)
	dir := t.TempDir()
	checkpointInto(t, shared, k, dir)
	endTask(t, shared, k)
	shared.SoftwareGPU(t, driver615+"fail=restore:2:1\n")
	failsToStart(t, k, dir, "restore CUDA process", "CUDA_ERROR_OUT_OF_MEMORY")
	shared.SoftwareGPU(t, driver615)
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(4000))
	}
	k.Expect(t, "verify", "bad=0")
}

// Who copies dies in the middle of a restore: nothing of the container is left, and the next restore is good.
func TestCustomStorageMoverKilledInRestore(t *testing.T) {
	withCustomStorage(t, "")
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "24M")
	k.Expect(t, "verify", "bad=0")
	dir := t.TempDir()
	checkpointInto(t, shared, k, dir)
	endTask(t, shared, k)
	shared.SoftwareGPU(t, driver615+"restore_delay_ms=3000\n")
	done := make(chan error, 1)
	go func() { done <- restoreTask(t, shared, k, dir) }()
	var helpers []int // the first asks the driver for all else
	harness.Within(t, "the mover", func() bool {
		helpers = helpersOf(t)
		return len(helpers) > 1
	})
	if err := unix.Kill(helpers[len(helpers)-1], unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	harness.Says(t, <-done, "restore GPU state", "CUDA helper is gone")
	shared.SoftwareGPU(t, driver615)
	ctr(t, shared, "tasks", "delete", k.ID)
	nothingLeft(t, shared, k)
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(4000))
	}
	k.Expect(t, "verify", "bad=0")
}

// A driver that does not let go of a process whose mover has died: nobody can say that the program goes on. The error says
// so, and the container can be ended.
func TestCustomStorageStuck(t *testing.T) {
	withCustomStorage(t, "")
	shared.Configured(t, "stall_timeout = \"2s\"\n"+harness.AnyCheckpoint+shared.Staging("staging", "custom_storage = true\n"))
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "24M")
	k.Expect(t, "verify", "bad=0")
	dir := t.TempDir()
	err := whileMapped(t, k, "stuck=1\n", func(ctx context.Context) error {
		_, err := k.CheckpointTask(ctx, harness.TaskCheckpoint{ImagePath: dir})
		return err
	})
	harness.Says(t, err, "save GPU state", "which is checkpointing and which the driver does not let go of: end the container")
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("the checkpoint has left %v, %v", left, err)
	}
	endTask(t, shared, k)
	nothingLeft(t, shared, k)
}

// Who copies dies while a program that is left running gets its memory back: the next try brings it back.
func TestCustomStorageMoverKilledOnTheWayBack(t *testing.T) {
	withCustomStorage(t, "")
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "24M")
	k.Expect(t, "verify", "bad=0")
	shared.SoftwareGPU(t, driver615+"restore_delay_ms=2000\n")
	dir := t.TempDir()
	done := make(chan error, 1)
	go func() { done <- checkpointTask(t, shared, k, dir) }()
	shim, dumped := shimOf(t, k), "id="+k.ID+" operation=checkpoint phase=dump"
	harness.Within(t, "the dump", func() bool { return strings.Contains(shared.Log(), dumped) })
	var helpers []int // the first asks the driver for all else
	harness.Within(t, "the mover", func() bool {
		helpers = childrenOf(shim, "gpuckpt-cuda-helper")
		return len(helpers) > 1
	})
	if err := unix.Kill(helpers[len(helpers)-1], unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil { // else it was the mover of the way out, which was about to end
		harness.Says(t, err, "is complete", "give GPU state back", "CUDA helper is gone")
	}
	shared.SoftwareGPU(t, driver615)
	goesOn(t, k)
	isCustom(t, dir) // it is complete
}
