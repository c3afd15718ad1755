// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/typeurl/v2"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A container that is left running goes on when CRIU is done, not when the disk
// is.
func TestGoesOnBeforeTheDisk(t *testing.T) {
	results.Add(t)
	k := start(t, shared, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "24M")
	expect(t, k, "verify", "bad=0")
	checkpointInto(t, shared, k, t.TempDir())
	var names []string
	for _, p := range timelineOf(t, shared, k.ID).Phases {
		names = append(names, p.Name)
	}
	dump, back, resume, store := slices.Index(names, "dump"), slices.Index(names, "give GPU state back"),
		slices.Index(names, "resume"), slices.Index(names, "store GPU state")
	if dump < 0 || back < dump || resume < back || store < resume {
		t.Errorf("the steps were %q", names)
	}
	expect(t, k, "verify", "bad=0")
}

// fullDir is a directory of 16 MiB: a file system on a disk, or a tmpfs.
func fullDir(t *testing.T, kind string) string {
	t.Helper()
	dir := t.TempDir()
	if kind == "memory" {
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=16m"); err != nil {
			t.Fatal(err)
		}
	} else {
		image := filepath.Join(t.TempDir(), "image")
		if err := os.WriteFile(image, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(image, 16<<20); err != nil {
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

// A file system without room for the checkpoint: a clear error, the container
// goes on, whether it was to end or not, and what there was of GPU state goes.
func TestNoRoom(t *testing.T) {
	for _, kind := range []string{"disk", "memory"} {
		for _, exit := range []bool{false, true} {
			name := kind + " leave"
			if exit {
				name = kind + " exit"
			}
			t.Run(name, func(t *testing.T) {
				results.Add(t)
				k := start(t, shared, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "24M")
				expect(t, k, "verify", "bad=0")
				dir := fullDir(t, kind)
				options, err := typeurl.MarshalAnyToProto(&runcoptions.CheckpointOptions{ImagePath: dir, Exit: exit})
				if err != nil {
					t.Fatal(err)
				}
				_, err = shared.Client().TaskService().Checkpoint(t.Context(), &tasks.CheckpointTaskRequest{
					ContainerID: k.ID, Options: options,
				})
				says(t, err, "o space left on device") // CRIU's words or Go's
				goesOn(t, k)
				if left, err := filepath.Glob(filepath.Join(dir, "gpu*")); err != nil || len(left) > 0 {
					t.Errorf("%q of the failed checkpoint are left, %v", left, err)
				}
				if _, err := images.ReadMetadata(dir); err == nil {
					t.Error("the failed checkpoint has metadata")
				}
				checkpointInto(t, shared, k, t.TempDir())
				goesOn(t, k)
			})
		}
	}
}
