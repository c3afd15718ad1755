// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package suspend

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

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

// containerd ends the container of a shim that has died, suspended or not: it forgets the task and
// deletes the bundle, and nobody could take the container over (docs/limits.md). No spilled state and
// no record is left behind.
func TestShimDies(t *testing.T) {
	for name, spill := range map[string]bool{"memory": false, "disk": true} {
		t.Run(name, func(t *testing.T) {
			results.Add(t)
			dir := diskDir(t)
			var flags []string
			if spill {
				flags = []string{"--spill", dir}
			}
			k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "8M")
			k.Expect(t, "verify", "bad=0")
			suspend(t, shared, k, flags...)
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
			harness.Within(t, "containerd forgets the task", func() bool {
				_, err := k.Status(t.Context())
				_, bundle := os.Stat(shared.Bundle(k.ID))
				return errdefs.IsNotFound(err) && errors.Is(bundle, os.ErrNotExist)
			})
			harness.Within(t, "the record is removed", func() bool {
				left, err := filepath.Glob(filepath.Join(shared.Records(), "*", k.ID+".json"))
				return err == nil && len(left) == 0
			})
		})
	}
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

// A driver that does not give a suspended program's GPU state back ends the container, with that reason: it
// does not stay suspended for good.
func TestDriverKeeps(t *testing.T) {
	for name, spill := range map[string]bool{"memory": false, "disk": true} {
		t.Run(name, func(t *testing.T) {
			results.Add(t)
			if gpu.Kind != harness.SoftwareGPU {
				t.Skip("only the software GPU can be told to keep it")
			}
			dir := diskDir(t)
			var flags []string
			if spill {
				flags = []string{"--spill", dir}
			}
			k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "32M")
			k.Expect(t, "verify", "bad=0")
			suspend(t, shared, k, flags...)
			shared.SoftwareGPU(t, "fail=restore:1\n")
			harness.Says(t, gpuckpt(t, shared, "resume", k.ID), "restore CUDA process", "CUDA_ERROR_INVALID_VALUE", "the container has ended")
			harness.Within(t, "the task exits", func() bool {
				status, err := k.Status(t.Context())
				return err == nil && status == client.Stopped
			})
			if left := spilledFiles(t, dir); len(left) > 0 {
				t.Errorf("spilled files are left: %v", left)
			}
			if left, err := filepath.Glob(filepath.Join(shared.Records(), "*", k.ID+".json")); err != nil || len(left) > 0 {
				t.Errorf("records are left: %v, %v", left, err)
			}
			harness.Within(t, "the host's memory is free", func() bool { return stagingMemory(t, "staging") < 16<<20 })
			k.MustRemove(t)
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
