// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// execDetached starts a process in the container, whose output nobody reads.
func execDetached(t *testing.T, c *harness.Containerd, k *harness.Container, execID string, args ...string) {
	t.Helper()
	// ctr does not remove the FIFOs of a process that it does not wait for;
	// there they go with the containerd.
	fifos := filepath.Join(c.Dir(), "fifo")
	ctr(t, c, append([]string{"tasks", "exec", "--detach", "--fifo-dir", fifos, "--exec-id", execID, k.ID}, args...)...)
}

// endExec ends it.
func endExec(t *testing.T, c *harness.Containerd, k *harness.Container) {
	t.Helper()
	ctr(t, c, "tasks", "kill", "--signal", "SIGKILL", "--exec-id", "guest", k.ID)
	shim := shimOf(t, k)
	harness.Within(t, "the exec'd process ends", func() bool { return childOf(shim, "gpuwork sleep") == 0 })
}

// A process that was exec'd into the container is no child of its first one:
// CRIU would leave it out. The checkpoint of a GPU container is refused, by its
// name, and works once it has ended.
func TestExecedProcess(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	execDetached(t, shared, k, "guest", "gpuwork", "sleep")
	// Before it is gpuwork it is runc, which ctr does not wait for.
	shim, guest := shimOf(t, k), 0
	harness.Within(t, "the exec'd process is a child of the shim", func() bool {
		guest = childOf(shim, "gpuwork sleep")
		return guest != 0
	})
	harness.Says(t, k.Checkpoint(t.Context(), "refused:1"), "exec'd", fmt.Sprintf("%d (gpuwork)", guest))
	harness.Says(t, plainCheckpoint(t, shared, k), "FailedPrecondition", "exec'd", fmt.Sprint(guest))
	isPaused(t, k, false)
	k.Expect(t, "count", "102")

	endExec(t, shared, k)
	ref := takeCheckpoint(t, shared, k, "1")
	k.MustRemove(t)
	r := restore(t, shared, k.ID, ref, k.Port)
	r.Expect(t, "count", "103")
}

// A process that was made before the pause is started while the driver's threads
// run: the container is thawed then, and runc, which lets nobody into a paused one,
// would let it in.
func TestExecStartedInCheckpoint(t *testing.T) {
	results.Add(t)
	k, hurry := slow(t)
	task := taskOf(t, shared, k)
	guest, err := task.Exec(t.Context(), "guest", &specs.Process{Args: []string{"gpuwork", "sleep"}, Env: []string{"PATH=/usr/bin:/bin:/"}, Cwd: "/"}, cio.NullIO)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	dir := t.TempDir()
	go func() { done <- checkpointTask(t, shared, k, dir) }()
	inCheckpoint(t, k)
	harness.Says(t, guest.Start(t.Context()), "failed precondition", "cannot exec", "try again")
	hurry()
	if pid := childOf(shimOf(t, k), "gpuwork sleep"); pid != 0 {
		t.Errorf("process %d was exec'd into the container", pid)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	goesOn(t, k)
	if err := guest.Start(t.Context()); err != nil {
		t.Error(err)
	}
	endExec(t, shared, k)
	if _, err := guest.Delete(t.Context()); err != nil {
		t.Error(err)
	}
}

// A container without CUDA is treated as runc's shim would.
func TestExecedProcessNoCUDA(t *testing.T) {
	results.Add(t)
	outcome := map[string]bool{}
	eachRuntime(t, func(t *testing.T, spec harness.RunSpec) {
		k := shared.Work(t, spec, "plain")
		k.Expect(t, "count", "101")
		execDetached(t, shared, k, "guest", "gpuwork", "sleep")
		err := k.Checkpoint(t.Context(), "checkpoint.test/"+harness.Name(t)+":1")
		t.Logf("with an exec'd process: %v", err)
		outcome[spec.Runtime] = err == nil
		isPaused(t, k, false)
		k.Expect(t, "count", "102")
	})
	if outcome[harness.Runtime] != outcome[harness.RuncRuntime] {
		t.Errorf("checkpoints succeed: %v; want the same with both", outcome)
	}
}
