// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package suspend

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/client"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// What cannot be suspended or resumed is told so, and nothing happens to it.
func TestRefusals(t *testing.T) {
	results.Add(t)
	k := start(t, shared, harness.RunSpec{GPUs: []int{0}}, "counter")
	expect(t, k, "count", "101")
	says(t, gpuckpt(t, shared, "resume", k.ID), "is not suspended")
	suspend(t, shared, k)
	says(t, gpuckpt(t, shared, "suspend", k.ID), "is suspended already")
	isPaused(t, shared, k, true)
	resume(t, shared, k)
	says(t, gpuckpt(t, shared, "resume", k.ID), "is not suspended")
	expect(t, k, "count", "102")
	says(t, gpuckpt(t, shared, "suspend", "no-such-container"), "find container no-such-container", "not found")

	plain := start(t, shared, harness.RunSpec{ID: id(t) + "-plain"}, "plain")
	says(t, gpuckpt(t, shared, "suspend", plain.ID), "no process of the container uses CUDA")
	isPaused(t, shared, plain, false)
	expect(t, plain, "count", "101")

	managed := start(t, shared, harness.RunSpec{ID: id(t) + "-managed", GPUs: []int{0}}, "managed")
	expect(t, managed, "count", "101")
	says(t, gpuckpt(t, shared, "suspend", managed.ID), "managed memory")
	isPaused(t, shared, managed, false)
	expect(t, managed, "count", "102")

	runc := start(t, shared, harness.RunSpec{ID: id(t) + "-runc", Runtime: harness.RuncRuntime, GPUs: []int{0}}, "counter")
	expect(t, runc, "count", "101")
	says(t, gpuckpt(t, shared, "suspend", runc.ID), "its runtime, io.containerd.runc.v2, is not gpuckpt's")
	isPaused(t, shared, runc, false)
	expect(t, runc, "count", "102")
}

// The annotations are read strictly.
func TestAnnotations(t *testing.T) {
	results.Add(t)
	k := start(t, shared, harness.RunSpec{GPUs: []int{0}}, "counter")
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
		says(t, task.Update(t.Context(), client.WithAnnotations(annotations)), "annotation dev.gpuckpt.")
	}
	isPaused(t, shared, k, false)
	expect(t, k, "count", "101")
}

// A container that was paused is suspended as it is. To resume it is to run.
func TestPausedBefore(t *testing.T) {
	results.Add(t)
	k := start(t, shared, harness.RunSpec{GPUs: []int{0}}, "counter")
	expect(t, k, "count", "101")
	if _, err := shared.Ctr(t.Context(), "tasks", "pause", k.ID); err != nil {
		t.Fatal(err)
	}
	free, _ := memory(t, 0, k)
	suspend(t, shared, k)
	hasNone(t, 0, k, free)
	resume(t, shared, k)
	expect(t, k, "count", "102")
}

// Stock clients' other requests for a suspended container are refused clearly
// and harm nothing.
func TestStockClients(t *testing.T) {
	results.Add(t)
	k := start(t, shared, harness.RunSpec{GPUs: []int{0}}, "counter")
	expect(t, k, "count", "101")
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
		says(t, err, refused.says)
		isPaused(t, shared, k, true)
	}
	resume(t, shared, k)
	expect(t, k, "count", "102")
	// Afterwards it is a container like any other.
	if err := k.Checkpoint(t.Context(), "suspended:2"); err != nil {
		t.Fatal(err)
	}
	expect(t, k, "count", "103")
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
			k := start(t, shared, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "32M")
			expect(t, k, "verify", "bad=0")
			suspend(t, shared, k, flags...)
			if err := k.Remove(t.Context()); err != nil {
				t.Fatal(err)
			}
			within(t, "the host's memory is free", func() bool { return stagingMemory(t) < 16<<20 })
		})
	}
}

// containerd ends the container of a shim that has died, suspended or not; no
// spilled state is left behind.
func TestShimDies(t *testing.T) {
	results.Add(t)
	dir := diskDir(t)
	k := start(t, shared, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "8M")
	expect(t, k, "verify", "bad=0")
	suspend(t, shared, k, "--spill", dir)
	pid := pidOf(t, k)
	if err := unix.Kill(parentOf(t, pid), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	within(t, "the container ends", func() bool {
		state, err := harness.ProcessState(pid)
		return err != nil || state == "Z"
	})
	within(t, "the spilled state is removed", func() bool { return len(spilledFiles(t, dir)) == 0 })
}

// parentOf is a process's parent.
func parentOf(t *testing.T, pid int) int {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "\nPPid:\t")
	line, _, _ := strings.Cut(rest, "\n")
	parent, err := strconv.Atoi(line)
	if err != nil {
		t.Fatal(err)
	}
	return parent
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
			k := start(t, shared, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "32M")
			expect(t, k, "verify", "bad=0")
			for _, step := range []string{"lock", "checkpoint"} {
				t.Run(step, func(t *testing.T) {
					softwareGPU(t, "fail="+step+":2:1\n")
					says(t, gpuckpt(t, shared, "suspend", append(flags, k.ID)...), step+" CUDA process", "CUDA_ERROR_OUT_OF_MEMORY")
					isPaused(t, shared, k, false)
					expect(t, k, "verify", "bad=0")
				})
			}
			suspend(t, shared, k, flags...)
			taken := stagingMemory(t)
			t.Run("restore", func(t *testing.T) {
				softwareGPU(t, "fail=restore:2\n")
				for range 2 {
					says(t, gpuckpt(t, shared, "resume", k.ID), "restore CUDA process", "CUDA_ERROR_OUT_OF_MEMORY", "stays suspended")
					isPaused(t, shared, k, true)
				}
			})
			// Nothing but the process's mapping of it holds memory longer.
			within(t, "the host's memory is as before", func() bool { return stagingMemory(t) <= taken+8<<20 })
			resume(t, shared, k)
			expect(t, k, "verify", "bad=0")
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
	k = start(t, shared, harness.RunSpec{GPUs: []int{0, 1}, Port: freePorts(t, 2)}, "multi", "--procs", "2", "--gpus", "2", "--bytes", "8M")
	verify = func() {
		t.Helper()
		for n := range 2 {
			expect(t, process(k, n), "verify", "bad=0")
			expect(t, process(k, n), "write 500", "wrote 500")
			expect(t, process(k, n), "verify", "bad=0")
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
	softwareGPU(t, "gpu1.fail=checkpoint:2\ngpu0.fail=restore:2\n")
	says(t, gpuckpt(t, shared, "suspend", k.ID), "checkpoint CUDA process", "restore CUDA process", "resume it again")
	softwareGPU(t, "")
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
			softwareGPU(t, "gpu1.fail=restore:2\n")
			for range 2 {
				says(t, gpuckpt(t, shared, "resume", k.ID), "restore CUDA process", "stays suspended")
				isPaused(t, shared, k, true)
			}
			softwareGPU(t, "")
			resume(t, shared, k)
			verify()
		})
	}
}

// A suspension needs no CRIU.
func TestNoCRIU(t *testing.T) {
	results.Add(t)
	path := t.TempDir()
	for _, name := range []string{"containerd-shim-gpuckpt-v2", "runc", "mount", "umount"} {
		program, err := bins.Path(name)
		if err != nil {
			if program, err = exec.LookPath(name); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Symlink(program, filepath.Join(path, name)); err != nil {
			t.Fatal(err)
		}
	}
	c := own(t, harness.Options{Env: []string{"PATH=" + path}})
	k := start(t, c, harness.RunSpec{GPUs: []int{0}}, "counter")
	expect(t, k, "count", "101")
	says(t, k.Checkpoint(t.Context(), "no-criu:1"), "no criu in $PATH")
	suspend(t, c, k)
	resume(t, c, k)
	expect(t, k, "count", "102")
}
