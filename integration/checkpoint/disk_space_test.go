// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/typeurl/v2"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// Blocks of zeros are holes in files that are memory, where the state is not to
// go back to the GPU from there, and the program has its zeros after a restore.
func TestZerosTakeNoMemory(t *testing.T) {
	results.Add(t)
	const bytes = 4 * images.BlockBytes // three blocks at least are zero
	for _, exit := range []bool{false, true} {
		k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--content", "zero", "--bytes", strconv.Itoa(bytes))
		k.Expect(t, "verify", "bad=0")
		dir := memoryDir(t)
		if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: dir, Exit: exit}); err != nil {
			t.Fatalf("%v\n%s", err, shared.LogTail(3000))
		}
		var size, taken int64
		for _, file := range areaFiles(t, dir) {
			var st unix.Stat_t
			if err := unix.Stat(file, &st); err != nil {
				t.Fatal(err)
			}
			size, taken = size+st.Size, taken+st.Blocks*512
		}
		if exit && taken > size-3*images.BlockBytes {
			t.Errorf("files of %d bytes take %d", size, taken)
		}
		if exit {
			ctr(t, shared, "tasks", "delete", k.ID)
		} else {
			k.Expect(t, "verify", "bad=0")
			endTask(t, shared, k)
		}
		if err := restoreTask(t, shared, k, dir); err != nil {
			t.Fatalf("%v\n%s", err, shared.LogTail(3000))
		}
		k.Expect(t, "verify", "bad=0")
		k.MustRemove(t)
	}
}

// The directory for the images is made if need be, as runc makes it.
func TestDirectoryIsMade(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "8M")
	k.Expect(t, "verify", "bad=0")
	dir := filepath.Join(harness.DiskDir(t), "not", "there")
	checkpointInto(t, shared, k, dir)
	if len(areaFiles(t, dir)) == 0 {
		t.Error("the GPU state is in no file of its own")
	}
	goesOn(t, k)
}

// smallDir is a directory of that many MiB: a file system on a disk, or a tmpfs.
func smallDir(t *testing.T, kind string, mib int64) string {
	t.Helper()
	dir := t.TempDir()
	if kind == "memory" {
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%dm", mib)); err != nil {
			t.Fatal(err)
		}
	} else {
		image := filepath.Join(t.TempDir(), "image")
		if err := os.WriteFile(image, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(image, mib<<20); err != nil {
			t.Fatal(err)
		}
		for _, c := range [][]string{{"mkfs.ext4", "-q", image}, {"mount", "-o", "loop", image, dir}} {
			if out, err := exec.CommandContext(t.Context(), c[0], c[1:]...).CombinedOutput(); err != nil {
				t.Fatalf("%q: %v\n%s", c, err, out)
			}
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

// failsForRoom makes a checkpoint that must fail because the directory is full,
// and checks that nothing is lost by it. meanwhile runs beside it.
func failsForRoom(t *testing.T, k *harness.Container, dir string, exit bool, meanwhile func(), words ...string) {
	t.Helper()
	options, err := typeurl.MarshalAnyToProto(&runcoptions.CheckpointOptions{ImagePath: dir, Exit: exit})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := shared.Client().TaskService().Checkpoint(t.Context(), &tasks.CheckpointTaskRequest{ContainerID: k.ID, Options: options})
		done <- err
	}()
	meanwhile()
	harness.Says(t, <-done, append(words, "o space left on device")...) // CRIU's words or Go's
	goesOn(t, k)
	if left, err := filepath.Glob(filepath.Join(dir, "gpu*")); err != nil || len(left) > 0 {
		t.Errorf("%q of the failed checkpoint are left, %v", left, err)
	}
	checkpointInto(t, shared, k, harness.DiskDir(t))
	goesOn(t, k)
}

// A file system without room for the GPU state is refused before anything is
// touched.
func TestNoRoom(t *testing.T) {
	for _, kind := range []string{"disk", "memory"} {
		t.Run(kind, func(t *testing.T) {
			results.Add(t)
			k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "24M")
			k.Expect(t, "verify", "bad=0")
			failsForRoom(t, k, smallDir(t, kind, 16), true, func() {}, "preflight", "free some, or choose another directory")
		})
	}
}

// A file system that fills up during the checkpoint: a clear error, the container
// goes on, whether it was to end or not, and what there was of GPU state goes.
func TestFillsUp(t *testing.T) {
	for _, kind := range []string{"disk", "memory"} {
		for mode, exit := range map[string]bool{"leave": false, "exit": true} {
			t.Run(kind+" "+mode, func(t *testing.T) {
				if gpu.Kind != harness.SoftwareGPU {
					t.Skip("a real driver is too fast, or its state too large, for a small file system")
				}
				results.Add(t)
				k, hurry := slow(t)
				dir := smallDir(t, kind, 64)
				failsForRoom(t, k, dir, exit, func() {
					inCheckpoint(t, k)
					fillUp(t, dir)
					hurry()
				})
			})
		}
	}
}

// fillUp takes all the room in a directory.
func fillUp(t *testing.T, dir string) {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for block := make([]byte, 1<<20); ; {
		n, err := f.Write(block)
		if err == nil {
			continue
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
		// What a file system keeps for what is not written yet it then gives.
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
		if n == 0 && len(block) == 1 {
			return
		}
		block = block[:max(1, len(block)/16)]
	}
}
