// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package suspend

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
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
	harness.Says(t, gpuckpt(t, shared, "suspend", "no-such-container"), "no such container in containerd's namespace", "not found")

	shim, err := bins.Path(proc.ShimName)
	if err != nil {
		t.Fatal(err)
	}
	byPath := shared.Work(t, harness.RunSpec{ID: harness.Name(t) + "-path", Runtime: shim, GPUs: []int{0}}, "counter")
	byPath.Expect(t, "count", "101")
	harness.Says(t, gpuckpt(t, shared, "resume", byPath.ID), "is not suspended")
	suspend(t, shared, byPath)
	harness.Says(t, gpuckpt(t, shared, "suspend", byPath.ID), "is suspended already")
	resume(t, shared, byPath)

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
	harness.Says(t, gpuckpt(t, shared, "resume", runc.ID), "its runtime, io.containerd.runc.v2, is not gpuckpt's")
	runc.Expect(t, "count", "102")
}

// A program that is exec'd all the while, as a probe is, stands in the way of no suspension.
func TestExecs(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	ctx, cancel := context.WithCancel(t.Context())
	var probes sync.WaitGroup
	for prober := range 3 {
		probes.Go(func() {
			for n := 0; ctx.Err() == nil; n++ { // those that come to a suspended container fail
				_, _ = shared.Ctr(ctx, "tasks", "exec", "--exec-id", fmt.Sprintf("probe-%d-%d", prober, n), k.ID, "/usr/bin/gpuwork", "exit", "0")
			}
		})
	}
	defer probes.Wait()
	defer cancel()
	for range 3 {
		suspend(t, shared, k)
		resume(t, shared, k)
	}
	k.Expect(t, "count", "102")
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

// The resume of a client that pauses for its checkpoint does not undo a suspension that came meanwhile: that is refused.
func TestPausedForACheckpoint(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	ctr := func(args ...string) {
		t.Helper()
		if _, err := shared.Ctr(t.Context(), append(append([]string{"tasks"}, args...), k.ID)...); err != nil {
			t.Fatal(err)
		}
	}
	ctr("pause")
	ctr("checkpoint", "--image-path", t.TempDir())
	harness.Says(t, gpuckpt(t, shared, "suspend", k.ID), "paused for a checkpoint", "ctr tasks resume")
	harness.Says(t, gpuckpt(t, shared, "resume", k.ID), "not suspended")
	ctr("resume")
	k.Expect(t, "count", "102")
	suspend(t, shared, k)
	resume(t, shared, k)
	k.Expect(t, "count", "103")
}

// Whoever presses Ctrl-C is told that a suspension that has begun goes on.
func TestInterrupted(t *testing.T) {
	if gpu.Kind != harness.SoftwareGPU {
		t.Skip("only the software GPU can be slow on demand")
	}
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	if err := shared.SetSoftwareGPU("checkpoint_delay_ms=2000"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := shared.SetSoftwareGPU(""); err != nil {
			t.Error(err)
		}
	}()
	program, err := bins.Path("gpuckpt")
	if err != nil {
		t.Fatal(err)
	}
	var errs strings.Builder
	cmd := exec.CommandContext(t.Context(), program, "suspend", "--address", shared.Address(), "--namespace", shared.Namespace(), k.ID)
	cmd.Stderr = &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	paused := func() bool {
		status, err := k.Status(t.Context())
		return err == nil && status == client.Paused
	}
	for deadline := time.Now().Add(time.Minute); !paused() && time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil || !strings.Contains(errs.String(), "interrupted: what has begun goes on") {
		t.Errorf("gpuckpt ended with %v and %q", err, errs.String())
	}
	harness.Says(t, gpuckpt(t, shared, "suspend", k.ID), "is suspended already") // it waits for its turn
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

// Processes that share GPU memory by CUDA IPC would never get off their suspension. They are refused
// and run on.
func TestSharedMemory(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}, Ports: 2}, "ipc")
	k.Expect(t, "count", "101")
	k.Process(1).Expect(t, "count", "102") // it has imported
	harness.Says(t, gpuckpt(t, shared, "suspend", k.ID), "CUDA IPC")
	k.Expect(t, "count", "103")
	k.Process(1).Expect(t, "count", "104")
}

// A pod's containers are named by its name in each command that takes containers. One without CUDA is left, and one that
// is suspended already.
func TestPod(t *testing.T) {
	results.Add(t)
	var both []*harness.Container
	for i, name := range []string{"first", "second", "without"} {
		spec, program := harness.RunSpec{ID: harness.Name(t) + "-" + name, GPUs: []int{0}}, "counter"
		if name == "without" {
			spec.GPUs, program = nil, "plain"
		}
		k := shared.Work(t, spec, program)
		container, err := shared.Client().LoadContainer(t.Context(), k.ID)
		if err == nil {
			_, err = container.SetLabels(t.Context(), map[string]string{
				"io.cri-containerd.kind": "container", "io.kubernetes.container.name": name,
				"io.kubernetes.pod.name": "trainer", "io.kubernetes.pod.namespace": "team", "io.kubernetes.pod.uid": "1",
			})
		}
		if err != nil {
			t.Fatal(err)
		}
		if program == "plain" {
			harness.Says(t, gpuckpt(t, shared, "suspend", "--pod", "team/trainer", name), "no process of the container uses CUDA")
			continue
		}
		k.Expect(t, "next", "101")
		both = append(both, k)
		if i == 0 {
			harness.Says(t, gpuckpt(t, shared, "suspend", "--pod", "team/trainer", "second"), "no container second of the pod team/trainer runs")
		}
	}
	if err := gpuckpt(t, shared, "suspend", "--pod", "trainer", "second"); err != nil {
		t.Fatal(err)
	}
	isPaused(t, shared, both[0], false)
	isPaused(t, shared, both[1], true)
	// Its shim lives, so there is nothing to undo.
	if err := gpuckpt(t, shared, "recover", "--pod", "team/trainer"); err != nil {
		t.Error(err)
	}
	for _, order := range []string{"suspend", "resume"} { // the first one leaves the second container
		var told struct {
			Containers []struct{ Container, State, Why string }
		}
		if err := shared.Gpuckpt(t.Context(), &told, order, "--namespace", shared.Namespace(), "--pod", "team/trainer"); err != nil || len(told.Containers) != 3 || told.Containers[2].State != "left" || told.Containers[2].Why == "" {
			t.Fatalf("%+v, %v\n%s", told, err, shared.LogTail(4000))
		}
		for _, k := range both {
			isPaused(t, shared, k, order == "suspend")
		}
		harness.Says(t, gpuckpt(t, shared, order, "--pod", "team/trainer"), both[0].ID+": ", map[string]string{"suspend": "is suspended already", "resume": "is not suspended"}[order])
	}
	var told []struct{ Container, Operation string }
	if err := shared.Gpuckpt(t.Context(), &told, "report", "--namespace", shared.Namespace(), "--pod", "team/trainer", "first"); err != nil || len(told) != 2 || told[0].Container != both[0].ID || told[1].Operation != "resume" {
		t.Errorf("%+v, %v", told, err)
	}
	harness.Says(t, gpuckpt(t, shared, "suspend", "--pod", "team/nobody"), "no container of a pod team/nobody runs")
}
