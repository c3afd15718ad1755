// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package suspend

import (
	"testing"

	"github.com/containerd/containerd/v2/client"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// What cannot be suspended or resumed is told so, and nothing happens to it.
func TestRefusals(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	harness.Says(t, gpuckpt(t, shared, "resume", k.ID), "is not suspended")
	suspend(t, shared, k)
	harness.Says(t, gpuckpt(t, shared, "suspend", k.ID), "is suspended already")
	isPaused(t, shared, k, true)
	resume(t, shared, k)
	harness.Says(t, gpuckpt(t, shared, "resume", k.ID), "is not suspended")
	k.Expect(t, "count", "102")
	harness.Says(t, gpuckpt(t, shared, "suspend", "no-such-container"), "find container no-such-container", "not found")

	plain := shared.Work(t, harness.RunSpec{ID: harness.Name(t) + "-plain"}, "plain")
	harness.Says(t, gpuckpt(t, shared, "suspend", plain.ID), "no process of the container uses CUDA")
	isPaused(t, shared, plain, false)
	plain.Expect(t, "count", "101")

	managed := shared.Work(t, harness.RunSpec{ID: harness.Name(t) + "-managed", GPUs: []int{0}}, "managed")
	managed.Expect(t, "count", "101")
	harness.Says(t, gpuckpt(t, shared, "suspend", managed.ID), "managed memory")
	isPaused(t, shared, managed, false)
	managed.Expect(t, "count", "102")

	runc := shared.Work(t, harness.RunSpec{ID: harness.Name(t) + "-runc", Runtime: harness.RuncRuntime, GPUs: []int{0}}, "counter")
	runc.Expect(t, "count", "101")
	harness.Says(t, gpuckpt(t, shared, "suspend", runc.ID), "its runtime, io.containerd.runc.v2, is not gpuckpt's")
	isPaused(t, shared, runc, false)
	runc.Expect(t, "count", "102")
}

// The annotations are read strictly.
func TestAnnotations(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	container, err := shared.Client().LoadContainer(t.Context(), k.ID)
	if err != nil {
		t.Fatal(err)
	}
	task, err := container.Task(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, annotations := range []map[string]string{
		{"dev.gpuckpt.suspend": "yes"},
		{"dev.gpuckpt.suspend.spill": "/tmp"},
		{"dev.gpuckpt.suspend": "false", "dev.gpuckpt.suspend.spill": "/tmp"},
		{"dev.gpuckpt.suspend": "true", "dev.gpuckpt.suspend.spill": "tmp"},
		{"dev.gpuckpt.suspend": "true", "dev.gpuckpt.resume.gpus": "0"},
		{"dev.gpuckpt.suspend": "false", "dev.gpuckpt.resume.gpus": "0,"},
	} {
		harness.Says(t, task.Update(t.Context(), client.WithAnnotations(annotations)), "annotation dev.gpuckpt.")
	}
	isPaused(t, shared, k, false)
	k.Expect(t, "count", "101")
}

// A container that was paused is suspended as it is. To resume it is to run.
func TestPausedBefore(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	if _, err := shared.Ctr(t.Context(), "tasks", "pause", k.ID); err != nil {
		t.Fatal(err)
	}
	free, _ := memory(t, 0, k)
	suspend(t, shared, k)
	hasNone(t, 0, k, free)
	resume(t, shared, k)
	k.Expect(t, "count", "102")
}

// Stock clients' other requests for a suspended container are refused clearly
// and harm nothing.
func TestStockClients(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	suspend(t, shared, k)
	for _, refused := range []struct {
		args []string
		says string
	}{
		{[]string{"tasks", "pause", k.ID}, "cannot pause a suspended"},
		{[]string{"tasks", "checkpoint", "--image-path", t.TempDir(), k.ID}, "is suspended"},
		{[]string{"containers", "checkpoint", "--rw", "--image", "--task", k.ID, "suspended:1"}, "suspended container"},
		{[]string{"tasks", "exec", "--exec-id", "hello", k.ID, "gpuwork", "echo", "hello"}, "paused"},
	} {
		_, err := shared.Ctr(t.Context(), refused.args...)
		harness.Says(t, err, refused.says)
		isPaused(t, shared, k, true)
	}
	resume(t, shared, k)
	k.Expect(t, "count", "102")
	// Afterwards it is a container like any other.
	if err := k.Checkpoint(t.Context(), "suspended:2"); err != nil {
		t.Fatal(err)
	}
	k.Expect(t, "count", "103")
}

// A suspended container is killed and removed like any other; what it had on
// the host is freed.
func TestKillSuspended(t *testing.T) {
	for name, spill := range map[string]bool{"memory": false, "disk": true} {
		t.Run(name, func(t *testing.T) {
			results.Add(t)
			var flags []string
			if spill {
				flags = []string{"--spill", diskDir(t)}
			}
			k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "32M")
			k.Expect(t, "verify", "bad=0")
			suspend(t, shared, k, flags...)
			if err := k.Remove(t.Context()); err != nil {
				t.Fatal(err)
			}
			harness.Within(t, "the host's memory is free", func() bool { return stagingMemory(t, "staging") < 16<<20 })
		})
	}
}

// containerd ends the container of a shim that has died, suspended or not; no
// spilled state is left behind.
func TestShimDies(t *testing.T) {
	results.Add(t)
	dir := diskDir(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "8M")
	k.Expect(t, "verify", "bad=0")
	suspend(t, shared, k, "--spill", dir)
	pid := k.MustPid(t)
	shim, err := harness.Parent(pid)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(shim, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	harness.Within(t, "the container ends", func() bool {
		state, err := harness.ProcessState(pid)
		return err != nil || state == "Z"
	})
	harness.Within(t, "the spilled state is removed", func() bool { return len(spilledFiles(t, dir)) == 0 })
}

// A driver that fails leaves the container as it was: running when it was to be
// suspended, suspended when it was to be resumed, in memory and on a disk.
func TestDriverFails(t *testing.T) {
	for name, spill := range map[string]bool{"memory": false, "disk": true} {
		t.Run(name, func(t *testing.T) {
			results.Add(t)
			if gpu.Kind != harness.SoftwareGPU {
				t.Skip("only the software GPU can be told to fail")
			}
			var flags []string
			if spill {
				flags = []string{"--spill", diskDir(t)}
			}
			k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "32M")
			k.Expect(t, "verify", "bad=0")
			for _, step := range []string{"lock", "checkpoint"} {
				t.Run(step, func(t *testing.T) {
					shared.SoftwareGPU(t, "fail="+step+":2:1\n")
					harness.Says(t, gpuckpt(t, shared, "suspend", append(flags, k.ID)...), step+" CUDA process", "CUDA_ERROR_OUT_OF_MEMORY")
					isPaused(t, shared, k, false)
					k.Expect(t, "verify", "bad=0")
				})
			}
			suspend(t, shared, k, flags...)
			taken := stagingMemory(t, "staging")
			t.Run("restore", func(t *testing.T) {
				shared.SoftwareGPU(t, "fail=restore:2\n")
				for range 2 {
					harness.Says(t, gpuckpt(t, shared, "resume", k.ID), "restore CUDA process", "CUDA_ERROR_OUT_OF_MEMORY", "stays suspended")
					isPaused(t, shared, k, true)
				}
			})
			// Nothing but the process's mapping of it holds memory longer.
			harness.Within(t, "the host's memory is as before", func() bool { return stagingMemory(t, "staging") <= taken+8<<20 })
			resume(t, shared, k)
			k.Expect(t, "verify", "bad=0")
		})
	}
}

// pair starts a container of two CUDA processes, each with memory on a GPU of its
// own, of which the software GPU can be told to fail one.
func pair(t *testing.T) (k *harness.Container, verify func()) {
	t.Helper()
	if gpu.Kind != harness.SoftwareGPU {
		t.Skip("only the software GPU can be told to fail")
	}
	k = shared.Work(t, harness.RunSpec{GPUs: []int{0, 1}, Ports: 2}, "multi", "--procs", "2", "--gpus", "2", "--bytes", "8M")
	verify = func() {
		t.Helper()
		for n := range 2 {
			k.Process(n).Expect(t, "verify", "bad=0")
			k.Process(n).Expect(t, "write 500", "wrote 500")
			k.Process(n).Expect(t, "verify", "bad=0")
		}
	}
	verify()
	return k, verify
}

// A driver that can save only one of two processes, and then not give that one
// its GPU back, leaves the container stopped. It goes on once the driver can.
func TestDriverFailsOnTheWayBack(t *testing.T) {
	results.Add(t)
	k, verify := pair(t)
	shared.SoftwareGPU(t, "gpu1.fail=checkpoint:2\ngpu0.fail=restore:2\n")
	harness.Says(t, gpuckpt(t, shared, "suspend", k.ID), "checkpoint CUDA process", "restore CUDA process", "resume it again")
	shared.SoftwareGPU(t, "")
	if _, err := shared.Ctr(t.Context(), "tasks", "resume", k.ID); err != nil {
		t.Fatal(err)
	}
	isPaused(t, shared, k, false)
	verify()
}

// Of two processes one does not get its GPU back. The other, which had, is
// saved once more, wherever the driver then puts its state, and both are given
// back when the driver can.
func TestDriverFailsForOne(t *testing.T) {
	for name, spill := range map[string]bool{"memory": false, "disk": true} {
		t.Run(name, func(t *testing.T) {
			results.Add(t)
			var flags []string
			if spill {
				flags = []string{"--spill", diskDir(t)}
			}
			k, verify := pair(t)
			suspend(t, shared, k, flags...)
			shared.SoftwareGPU(t, "gpu1.fail=restore:2\n")
			for range 2 {
				harness.Says(t, gpuckpt(t, shared, "resume", k.ID), "restore CUDA process", "stays suspended")
				isPaused(t, shared, k, true)
			}
			shared.SoftwareGPU(t, "")
			resume(t, shared, k)
			verify()
		})
	}
}

// A suspension needs no CRIU.
func TestNoCRIU(t *testing.T) {
	results.Add(t)
	c := session.Own(t, harness.Options{Env: []string{"PATH=" + bins.PathWithout(t, t.TempDir(), "criu")}})
	k := c.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	harness.Says(t, k.Checkpoint(t.Context(), "no-criu:1"), "no criu in $PATH")
	suspend(t, c, k)
	resume(t, c, k)
	k.Expect(t, "count", "102")
}
