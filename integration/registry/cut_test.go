// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// Two containers of one shim count in turns in a /dev/shm that they share, as a pod's do, and each on
// its GPU. Checkpoints in one cut agree after the restore. A failure in one leaves both running, and
// nothing behind.
func TestCut(t *testing.T) {
	results.Add(t)
	t.Cleanup(func() { // once the containers are removed
		if err := shared.ForgetImages(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	shm := smallTmpfs(t, "64m")
	spec := func(i int, port int) harness.RunSpec {
		return harness.RunSpec{
			ID: harness.Name(t) + "-" + strconv.Itoa(i), Port: port, GPUs: []int{i % len(gpu.Devices)},
			Annotations: map[string]string{"io.containerd.runc.v2.group": harness.Name(t)},
			Amend: []oci.SpecOpts{oci.WithoutMounts("/dev/shm"), oci.WithMounts([]specs.Mount{{
				Destination: "/dev/shm", Source: shm, Type: "bind", Options: []string{"rbind", "rw", "nosuid", "nodev", "noexec"},
			}})},
		}
	}
	var both []*harness.Container
	for i := range 2 {
		both = append(both, shared.Work(t, spec(i, 0), "turns", "--file", "/dev/shm/count", "--start", strconv.Itoa(i), "--gpu", "0"))
	}
	countOn(t, both)

	const ref = "gpuckpt.test/cut:1"
	refs := []string{ref + "-" + both[0].ID, ref + "-" + both[1].ID}
	args := []string{"checkpoint", both[0].ID, both[1].ID, "--image", ref, "--leave-running"}
	if gpu.Kind == harness.SoftwareGPU {
		for _, fault := range []string{"gpu1.fail=lock:2", "gpu1.fail=checkpoint:2"} {
			undo := shared.SoftwareGPU(t, fault)
			fails(t, shared, nil, []string{"checkpoint " + both[1].ID + ": "}, args...)
			undo()
			for i, k := range both {
				if status, err := k.Status(t.Context()); err != nil || status != client.Running {
					t.Fatalf("after %s container %d is %q, %v", fault, i, status, err)
				}
				if _, err := shared.Client().ImageService().Get(t.Context(), refs[i]); err == nil {
					t.Errorf("after %s there is an image %s", fault, refs[i])
				}
			}
			if left := dumps(shared); len(left) > 0 {
				t.Errorf("after %s are left %q", fault, left)
			}
			countOn(t, both)
		}
	}
	fails(t, shared, nil, []string{"named twice"}, "checkpoint", both[0].ID, both[0].ID, "--image", ref)
	fails(t, shared, nil, []string{"name containers, or a pod"}, "checkpoint", "--image", ref)
	fails(t, shared, nil, []string{"no container of a pod nobody runs"}, "checkpoint", "--pod", "nobody", "--image", ref)

	made := asJSON[struct {
		Containers []harness.CheckpointAnswer `json:"containers"`
	}](t, shared, args...).Containers
	if len(made) != 2 || made[0].GPUBytes == 0 || made[1].GPUBytes == 0 || !made[1].Running {
		t.Fatalf("made were %+v", made)
	}
	countOn(t, both)
	for _, k := range both {
		k.MustRemove(t)
	}
	if err := os.Remove(filepath.Join(shm, "count")); err != nil {
		t.Fatal(err)
	}
	for i, k := range both {
		again := spec(i, k.Port)
		again.Image, again.Args = refs[i], []string{"gpuwork"}
		again.Annotations["dev.gpuckpt.restore"] = "true"
		both[i] = shared.Work(t, again)
	}
	countOn(t, both)
}

// A checkpoint that was killed has left its containers paused: gpuckpt recover resumes them.
func TestKilledCut(t *testing.T) {
	results.Add(t)
	c := session.Own(t, harness.Options{})
	var both []*harness.Container
	for i := range 2 {
		k := c.Work(t, harness.RunSpec{ID: harness.Name(t) + "-" + strconv.Itoa(i), GPUs: []int{0}}, "counter")
		k.Expect(t, "next", "101")
		both = append(both, k)
	}
	c.SoftwareGPU(t, "checkpoint_delay_ms=60000")
	cmd := command(t.Context(), t, c, nil, "checkpoint", both[0].ID, both[1].ID, "--image", "gpuckpt.test/killed:1")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, k := range both {
		harness.Within(t, k.ID+" is paused", func() bool {
			status, err := k.Status(t.Context())
			return err == nil && status == client.Paused
		})
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	for _, k := range both {
		if status, err := k.Status(t.Context()); err != nil || status != client.Paused {
			t.Fatalf("%s is %q, %v", k.ID, status, err)
		}
	}
	gpuckpt(t, c, "recover", "--address", c.Address(), "--namespace", c.Namespace())
	for _, k := range both {
		k.Expect(t, "next", "102")
	}
	if left := dumps(c); len(left) > 0 {
		t.Errorf("left are %q", left)
	}
}

// countOn waits until programs that count in turns have counted ten turns more. It fails the test if
// one finds that the count is not its own.
func countOn(t *testing.T, both []*harness.Container) {
	t.Helper()
	for _, k := range both {
		first := -1
		harness.Within(t, k.ID+" counts on", func() bool {
			answer := k.Answer(t, "count")
			n, err := strconv.Atoi(answer)
			if err != nil {
				t.Fatalf("%s: %s", k.ID, answer)
			}
			if first < 0 {
				first = n
			}
			return n > first+10
		})
	}
}
