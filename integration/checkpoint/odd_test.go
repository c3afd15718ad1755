// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// odd runs a container with a rare state (gpuwork odd), which has its files at a path.
func odd(t *testing.T, spec harness.RunSpec, state, file string) *harness.Container {
	t.Helper()
	spec.ID = harness.Name(t) + "-" + state
	k := shared.Work(t, spec, "odd", "--state", state, "--file", file)
	return k
}

// answer asks a container of odd once.
func answer(t *testing.T, k *harness.Container) string {
	t.Helper()
	got, err := k.Ask(t.Context(), "same?")
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, k.Logs(), shared.LogTail(3000))
	}
	return got
}

// A file that was removed while it is open, and has another name, is the same file after a restore: of
// an image that is restored again, and in place, as nerdctl does it with a container that has ended. CRIU
// leaves nothing beside the file.
func TestRemovedWithAnotherName(t *testing.T) {
	results.Add(t)
	for _, at := range []string{"/removed", "/volume/removed", "/dev/shm/removed"} {
		t.Run(strings.ReplaceAll(at[1:], "/", "-"), func(t *testing.T) {
			k := odd(t, harness.RunSpec{Mounts: volume(t)}, "other-name", at)
			same := func() {
				t.Helper()
				if got := answer(t, k); got != "same" {
					t.Error(got)
				}
				left, err := filepath.Glob(fmt.Sprintf("/proc/%d/root%s/link_remap.*", k.MustPid(t), filepath.Dir(at)))
				if err != nil || len(left) > 0 {
					t.Errorf("CRIU has left %q, %v", left, err)
				}
			}
			same()
			ref := takeCheckpoint(t, shared, k, "1")
			same()
			for range 2 {
				k.MustRemove(t)
				k = restore(t, shared, k.ID, ref, k.Port)
				same()
			}
			dir := t.TempDir()
			if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: dir, Exit: true}); err != nil {
				t.Fatalf("%v\n%s", err, shared.LogTail(3000))
			}
			restoreInPlace(t, k, dir)
			same()
		})
	}
}

// A program that watches files of its root file system, as tail -f and reloaders do, gets their events
// after a restore.
func TestWatch(t *testing.T) {
	results.Add(t)
	for _, at := range []string{"/watched", "/volume/watched", "/dev/shm/watched"} {
		t.Run(strings.ReplaceAll(at[1:], "/", "-"), func(t *testing.T) {
			k := odd(t, harness.RunSpec{Mounts: volume(t)}, "watch", at)
			ref := takeCheckpoint(t, shared, k, "1")
			k.MustRemove(t)
			if got := answer(t, restore(t, shared, k.ID, ref, k.Port)); got != "same" {
				t.Error(got)
			}
		})
	}
}

// A log that is gone when its program is restored is made anew, with its mode, also below directories
// that are gone. One that cannot be made is named.
func TestLogIsGone(t *testing.T) {
	results.Add(t)
	spec := harness.RunSpec{Mounts: volume(t)}
	dir := spec.Mounts[0].Source
	logs := filepath.Join(dir, "logs")
	if err := os.Mkdir(logs, 0o700); err != nil {
		t.Fatal(err)
	}
	k := odd(t, spec, "append", "/volume/logs/log")
	answer(t, k)
	ref := takeCheckpoint(t, shared, k, "1")
	k.MustRemove(t)
	if err := os.RemoveAll(logs); err != nil {
		t.Fatal(err)
	}
	k = restore(t, shared, k.ID, ref, k.Port)
	if got := answer(t, k); got != "same" {
		t.Error(got)
	}
	if st, err := os.Stat(filepath.Join(logs, "log")); err != nil || st.Mode() != 0o640 || st.Size() != 5 {
		t.Errorf("the log is %v, %v", st, err)
	}
	k.MustRemove(t)
	if err := errors.Join(os.RemoveAll(logs), os.WriteFile(logs, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	_, err := shared.Restore(t.Context(), k.ID, ref, k.Port)
	harness.Says(t, err, "volume/logs/log", "Not a directory")
	if err := shared.Remove(t.Context(), k.ID); err != nil {
		t.Error(err)
	}
}
