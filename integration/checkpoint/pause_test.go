// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"testing"

	"github.com/containerd/containerd/v2/client"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A container that its user has paused is checkpointed as it is, and stays
// paused until the user resumes it.
func TestPausedBefore(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	ctr(t, shared, "tasks", "pause", k.ID)
	isPaused(t, k, true)

	dir := t.TempDir()
	checkpointInto(t, shared, k, dir)
	isPaused(t, k, true)
	// It would hold as much of the host's memory as the GPU state takes.
	for _, name := range []string{"gpuckpt-tracer", "gpuckpt-digester"} {
		if pid := childOf(shimOf(t, k), name); pid != 0 {
			t.Errorf("after the checkpoint there is a %s, process %d", name, pid)
		}
	}
	// The same once more: nothing is used up by a checkpoint.
	checkpointInto(t, shared, k, t.TempDir())
	isPaused(t, k, true)

	ctr(t, shared, "tasks", "resume", k.ID)
	isPaused(t, k, false)
	k.Expect(t, "count", "102")
	_, err := shared.Ctr(t.Context(), "tasks", "resume", k.ID)
	harness.Says(t, err, "cannot resume a running")
	k.Expect(t, "count", "103")

	endTask(t, shared, k)
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatal(err)
	}
	isPaused(t, k, false)
	k.Expect(t, "count", "102")
}

// A pause alone is a pause: the GPU is not touched, and everything goes on.
func TestPauseAndResume(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "4M")
	for range 3 {
		ctr(t, shared, "tasks", "pause", k.ID)
		isPaused(t, k, true)
		_, err := shared.Ctr(t.Context(), "tasks", "pause", k.ID)
		harness.Says(t, err, "cannot pause a paused")
		isPaused(t, k, true)
		ctr(t, shared, "tasks", "resume", k.ID)
		isPaused(t, k, false)
		k.Expect(t, "verify", "bad=0")
	}
}

// A container can be killed while it is paused.
func TestKillPaused(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	ctr(t, shared, "tasks", "pause", k.ID)
	k.MustRemove(t)
}

// "ctr tasks checkpoint --exit" ends the container, and only once its
// checkpoint is complete.
func TestExit(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	exit, err := taskOf(t, shared, k).Wait(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{Exit: true, ImagePath: dir}); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(3000))
	}
	if code := (<-exit).ExitCode(); code != 128+9 {
		t.Errorf("exit code %d, want 137", code)
	}
	if status, err := k.Status(t.Context()); err != nil || status != client.Stopped {
		t.Errorf("status %q, error %v; want stopped", status, err)
	}
	endTask(t, shared, k)
	if err := restoreTask(t, shared, k, dir); err != nil {
		t.Fatal(err)
	}
	k.Expect(t, "count", "102")
}
