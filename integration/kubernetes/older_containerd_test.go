// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
)

// older are the programs with an older containerd in the place of the newest.
func older(t *testing.T, version string) harness.Bins {
	t.Helper()
	needs(t, "containerd-"+version)
	b, err := bins.WithContainerd(version, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// An older containerd and its ctr: checkpoint, kill, restore.
func TestOlderCtr(t *testing.T) {
	for _, version := range harness.OlderContainerds {
		t.Run(version, func(t *testing.T) { testOlderCtr(t, version) })
	}
}

func testOlderCtr(t *testing.T, version string) {
	results.Add(t)
	c := session.Own(t, harness.Options{Bins: older(t, version)})
	said, err := c.Ctr(t.Context(), "version")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Count(said, "v"+version+".") != 2 {
		t.Fatalf("not containerd %s and its ctr: %s", version, said)
	}
	k := c.Work(t, harness.RunSpec{ID: "older", GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	if err := k.Checkpoint(t.Context(), "older:1"); err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(4000))
	}
	k.Expect(t, "count", "102")
	k.MustRemove(t)
	if k, err = c.Restore(t.Context(), "older", "older:1", k.Port); err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(4000))
	}
	k.RemoveAtEnd(t)
	k.Expect(t, "count", "102")

	// The task alone: the container goes on, or ends with --exit.
	if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: filepath.Join(c.Dir(), "task")}); err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(4000))
	}
	k.Expect(t, "count", "103")
	// Of that ctr leaves an image too, named by the second: the name that the next
	// would want.
	left, err := c.Ctr(t.Context(), "images", "ls", "--quiet", "name~=^containerd.io/checkpoint/")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Ctr(t.Context(), "images", "rm", "--sync", strings.TrimSpace(left)); err != nil {
		t.Fatal(err)
	}
	// gpuckpt, which makes an image that is run to go on.
	if _, err := c.Output(t.Context(), "gpuckpt", "checkpoint", "older", "--image", "gpuckpt.test/older:2", "--leave-running", "--image-path", filepath.Join(c.Dir(), "dumps"),
		"--address", c.Address(), "--namespace", c.Namespace(), "--quiet"); err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(4000))
	}
	k.Expect(t, "count", "104")
	if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: filepath.Join(c.Dir(), "exit"), Exit: true}); err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(4000))
	}
	if _, err := k.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	k.MustRemove(t)
	if k, err = c.Run(t.Context(), harness.RunSpec{
		ID: "resumed", Image: "gpuckpt.test/older:2", Port: k.Port, GPUs: []int{0}, Annotations: restoring,
	}); err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(4000))
	}
	k.RemoveAtEnd(t)
	k.Expect(t, "count", "104")
}

// The kubelet on an older containerd, with the runtime by its path and by its name:
// checkpoint, and a pod of the image that is made of it.
func TestOlderKubelet(t *testing.T) {
	for _, version := range harness.OlderContainerds {
		for _, runtime := range []string{node.ByPath, node.ByName} {
			t.Run(version+" "+runtime, func(t *testing.T) {
				results.Add(t)
				n := own(t, node.Options{Runtime: runtime, Bins: older(t, version)})
				restoreStatic(t, n)
				if runtime == node.ByName {
					stopStatic(t, n)
				}
			})
		}
	}
}

// restoreStatic checkpoints a static pod, by the kubelet and by crictl, makes an image
// of what crictl wrote and runs that.
func restoreStatic(t *testing.T, n *node.Node) {
	t.Helper()
	name := podName(t)
	pod, err := n.RunStatic(t.Context(), name, counter{}.manifest(name))
	if err != nil {
		t.Fatalf("%v\n%s", err, n.LogTail(4000))
	}
	expect(t, pod, counterPort, "101")
	archive, err := n.Checkpoint(t.Context(), pod.Metadata.Name, "counter", 0)
	if err != nil {
		t.Fatalf("%v\n%s", err, n.LogTail(4000))
	}
	holdsGPUState(t, archive)
	expect(t, pod, counterPort, "102")

	archive = filepath.Join(n.Dir(), "crictl.tar")
	if _, err := n.Crictl(t.Context(), "checkpoint", "--export", archive, pod.Container("counter")); err != nil {
		t.Fatalf("%v\n%s", err, n.LogTail(4000))
	}
	holdsGPUState(t, archive)
	expect(t, pod, counterPort, "103")

	restored := runImage(t, n, archive, name+"-restored")
	expect(t, restored, counterPort, "103")
}

// runImage makes an image of an archive and runs a static pod of it.
func runImage(t *testing.T, n *node.Node, archive, name string) node.Pod {
	t.Helper()
	ref := "gpuckpt.test/" + name + ":1"
	if _, err := n.Output(t.Context(), "gpuckpt", "image", "build", "kubernetes-archive:"+archive, ref, "--address", n.Address(), "--namespace", node.Namespace, "--quiet"); err != nil {
		t.Fatal(err)
	}
	pod, err := n.RunStatic(t.Context(), name, counter{image: ref, annotations: restoring}.manifest(name))
	if err != nil {
		t.Fatalf("%v\n%s", err, n.LogTail(4000))
	}
	return pod
}

// stopStatic checkpoints a static pod that asks to end with it.
func stopStatic(t *testing.T, n *node.Node) {
	t.Helper()
	name := podName(t) + "-stop"
	pod, err := n.RunStatic(t.Context(), name, counter{restart: "Never", annotations: map[string]string{"dev.gpuckpt.on-checkpoint": "stop"}}.manifest(name))
	if err != nil {
		t.Fatalf("%v\n%s", err, n.LogTail(4000))
	}
	expect(t, pod, counterPort, "101")
	archive, err := n.Checkpoint(t.Context(), pod.Metadata.Name, "counter", 0)
	if err != nil {
		t.Fatalf("%v\n%s", err, n.LogTail(4000))
	}
	holdsGPUState(t, archive)
	if _, err := n.WaitFor(t.Context(), pod.Metadata.Name, func(pod node.Pod) bool { return pod.Status.Phase == "Failed" }); err != nil {
		t.Error(err)
	}
}
