// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A checkpoint that its own restore would refuse is refused, also one that is to end the container,
// and leaves nothing. The container runs on.
func TestOwnRestoreWouldRefuse(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}, Annotations: map[string]string{"dev.gpuckpt.on-checkpoint": "stop"}}, "counter")
	k.Expect(t, "count", "101")
	// More than the container could have got by itself.
	if err := unix.Setpriority(unix.PRIO_PROCESS, k.MustPid(t), -5); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "images")
	words := []string{"admit", "its own restore would refuse it", "nice value -5"}
	harness.Says(t, checkpointTask(t, shared, k, dir), words...)
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the directory of the images is left: %v", err)
	}
	isPaused(t, k, false)
	harness.Says(t, plainCheckpoint(t, shared, k), append(words, "code = FailedPrecondition")...) // which would end it
	isPaused(t, k, false)
	k.Expect(t, "count", "102")
	if err := unix.Setpriority(unix.PRIO_PROCESS, k.MustPid(t), 0); err != nil {
		t.Fatal(err)
	}
	ref := takeCheckpoint(t, shared, k, "1")
	k.MustRemove(t)
	restore(t, shared, k.ID, ref, k.Port).Expect(t, "count", "103")
}

// Mounts of one driver file at names that are links to one another, in a directory of the host, are
// one mount: they were two at one place, which a restore refused.
func TestMountsAtLinks(t *testing.T) {
	results.Add(t)
	dir := t.TempDir()
	const version = "libnvidia-opticalflow.so.580.159.04"
	write(t, filepath.Join(dir, version), "a library", 0o755)
	for name, to := range map[string]string{"libnvidia-opticalflow.so": "libnvidia-opticalflow.so.1", "libnvidia-opticalflow.so.1": version} {
		if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	mounts := []specs.Mount{{Type: "bind", Source: dir, Destination: "/usr/local/links", Options: []string{"rbind", "ro"}}}
	for _, name := range []string{"libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1", version} {
		mounts = append(mounts, specs.Mount{
			Type: "bind", Source: filepath.Join(dir, version), Destination: "/usr/local/links/" + name, Options: []string{"rbind", "ro"},
		})
	}
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}, Mounts: mounts}, "counter")
	k.Expect(t, "count", "101")
	mounted, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", k.MustPid(t)))
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(mounted), " /usr/local/links/"); n != 1 {
		t.Errorf("%d mounts below /usr/local/links, want one:\n%s", n, mounted)
	}
	images := t.TempDir()
	checkpointInto(t, shared, k, images)
	endTask(t, shared, k)
	if err := restoreTask(t, shared, k, images); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	k.Expect(t, "count", "102")
}
