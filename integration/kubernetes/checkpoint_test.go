// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
)

// The kubelet's checkpoint of a GPU pod is an archive with the GPU state in it, all
// in files of one directory, which checkpointctl reads; and the pod goes on.
func TestCheckpoint(t *testing.T) {
	result := results.Add(t)
	pod := apply(t, shared(t), podName(t), counter{})
	expect(t, pod, counterPort, "101")
	var archive string
	if err := result.Time("checkpoint", func() (err error) {
		archive, err = shared(t).Checkpoint(t.Context(), pod.Metadata.Name, "counter", 0)
		return err
	}); err != nil {
		t.Fatalf("%v\n%s", err, shared(t).LogTail(4000))
	}
	expect(t, pod, counterPort, "102")
	if dir := filepath.Join(shared(t).Dir(), "kubelet", "checkpoints"); filepath.Dir(archive) != dir {
		t.Errorf("the archive is %s, not in %s", archive, dir)
	}
	holdsGPUState(t, archive)
	show, err := shared(t).Output(t.Context(), "checkpointctl", "show", archive)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"counter", harness.WorkloadImage, pod.Container("counter")[:12], "containerd"} {
		if !strings.Contains(show, want) {
			t.Errorf("checkpointctl does not show %s:\n%s", want, show)
		}
	}
}

// A kubelet without an API server checkpoints static pods, here with the runtime by
// its own name: the request has no options then.
func TestStandaloneByName(t *testing.T) {
	results.Add(t)
	n := own(t, node.Options{Runtime: node.ByName})
	name := podName(t)
	pod, err := n.RunStatic(t.Context(), name, counter{}.manifest(name))
	if err != nil {
		t.Fatalf("%v\n%s", err, n.KubeletLog(4000))
	}
	expect(t, pod, counterPort, "101")
	archive, err := n.Checkpoint(t.Context(), pod.Metadata.Name, "counter", 0)
	if err != nil {
		t.Fatalf("%v\n%s", err, n.LogTail(4000))
	}
	holdsGPUState(t, archive)
	expect(t, pod, counterPort, "102")
	if _, err := n.Output(t.Context(), "checkpointctl", "show", archive); err != nil {
		t.Error(err)
	}
	expect(t, runImage(t, n, archive, name+"-restored"), counterPort, "102")
	if err := n.DeleteStatic(t.Context(), name); err != nil {
		t.Error(err)
	}
	_, err = n.Checkpoint(t.Context(), pod.Metadata.Name, "counter", 0)
	isStatus(t, err, http.StatusNotFound, "pod does not exist")
}

// An annotation of the pod decides what becomes of it when the request has no
// options: here it ends, and the kubelet leaves it so.
func TestStopOnCheckpoint(t *testing.T) {
	results.Add(t)
	pod := apply(t, shared(t), podName(t), counter{
		class: "gpuckpt-by-name", restart: "Never", annotations: map[string]string{"dev.gpuckpt.on-checkpoint": "stop"},
	})
	expect(t, pod, counterPort, "101")
	archive, err := shared(t).Checkpoint(t.Context(), pod.Metadata.Name, "counter", 0)
	if err != nil {
		t.Fatalf("%v\n%s", err, shared(t).LogTail(4000))
	}
	holdsGPUState(t, archive)
	if _, err := shared(t).WaitFor(t.Context(), pod.Metadata.Name, func(pod node.Pod) bool { return pod.Status.Phase == "Failed" }); err != nil {
		t.Error(err)
	}
}

// Two pods on one GPU are checkpointed at once.
func TestTwoAtOnce(t *testing.T) {
	results.Add(t)
	pods := []node.Pod{apply(t, shared(t), podName(t)+"-a", counter{}), apply(t, shared(t), podName(t)+"-b", counter{})}
	var archives [2]string
	var errs [2]error
	var both sync.WaitGroup
	for i, pod := range pods {
		expect(t, pod, counterPort, "101")
		both.Go(func() { archives[i], errs[i] = shared(t).Checkpoint(t.Context(), pod.Metadata.Name, "counter", 0) })
	}
	both.Wait()
	for i, pod := range pods {
		if errs[i] != nil {
			t.Errorf("%v\n%s", errs[i], shared(t).LogTail(4000))
			continue
		}
		holdsGPUState(t, archives[i])
		expect(t, pod, counterPort, "102")
	}
}

// Of two checkpoints of one container at once one is made, and the other is refused, although CRI keeps both in one
// directory. containerd can still lose both: one request sees the other's pause, and its dump begins before that one's.
// The other is refused, and containerd removes the directory for it while it writes the archive there. The pod goes on.
// TestSecondMeanwhile is of two that come in order, of which none may be lost.
func TestTwiceAtOnce(t *testing.T) {
	results.Add(t)
	needs(t, "crictl")
	hurry := softwareGPU(t, shared(t), "checkpoint_delay_ms=20000\n") // longer than one begins after the other
	pod := apply(t, shared(t), podName(t), counter{})
	expect(t, pod, counterPort, "101")
	var archives [2]string
	var errs [2]error
	var both sync.WaitGroup
	for i := range archives {
		both.Go(func() {
			archives[i] = filepath.Join(shared(t).Dir(), podName(t)+string(rune('a'+i))+".tar")
			_, errs[i] = shared(t).Crictl(t.Context(), "checkpoint", "--export", archives[i], pod.Container("counter"))
			hurry() // the first answer is the refusal
		})
	}
	both.Wait()
	refused := 0
	for i, archive := range archives {
		switch err := errs[i]; {
		case err == nil: // both, if they were one after the other
			holdsGPUState(t, archive)
		case strings.Contains(err.Error(), "another checkpoint of the container is being made"), strings.Contains(err.Error(), "cannot pause a paused container"):
			refused++
		case strings.Contains(err.Error(), "/ctrd-checkpoint"):
			t.Logf("containerd took its directory away: %v", err)
		default:
			t.Errorf("one of them: %v", err)
		}
	}
	if refused > 1 {
		t.Errorf("both were refused: %v", errs)
	}
	expect(t, pod, counterPort, "102")
	if _, err := shared(t).Checkpoint(t.Context(), pod.Metadata.Name, "counter", 0); err != nil {
		t.Fatal(err)
	}
	expect(t, pod, counterPort, "103")
}

// A second checkpoint that begins in the middle of another is refused, says why, and
// does not disturb it.
func TestSecondMeanwhile(t *testing.T) {
	results.Add(t)
	needs(t, "crictl")
	hurry := softwareGPU(t, shared(t), "checkpoint_delay_ms=20000\n")
	pod := apply(t, shared(t), podName(t), counter{})
	expect(t, pod, counterPort, "101")
	type answer struct {
		archive string
		err     error
	}
	first := make(chan answer, 1)
	go func() {
		archive, err := shared(t).Checkpoint(t.Context(), pod.Metadata.Name, "counter", 0)
		first <- answer{archive, err}
	}()
	paused(t, shared(t), pod)
	_, err := shared(t).Crictl(t.Context(), "checkpoint", "--export", filepath.Join(shared(t).Dir(), "second.tar"), pod.Container("counter"))
	hurry()
	if err == nil || !strings.Contains(err.Error(), "another checkpoint of the container is being made") {
		t.Errorf("the second: %v", err)
	}
	got := <-first
	if got.err != nil {
		t.Fatalf("the first: %v\n%s", got.err, shared(t).LogTail(4000))
	}
	holdsGPUState(t, got.archive)
	expect(t, pod, counterPort, "102")
}

// crictl checkpoints as the kubelet does.
func TestCrictl(t *testing.T) {
	results.Add(t)
	needs(t, "crictl")
	pod := apply(t, shared(t), podName(t), counter{})
	expect(t, pod, counterPort, "101")
	archive := filepath.Join(shared(t).Dir(), "crictl.tar")
	if _, err := shared(t).Crictl(t.Context(), "checkpoint", "--export", archive, pod.Container("counter")); err != nil {
		t.Fatalf("%v\n%s", err, shared(t).LogTail(4000))
	}
	holdsGPUState(t, archive)
	expect(t, pod, counterPort, "102")
}

// What is not there is not found.
func TestUnknown(t *testing.T) {
	results.Add(t)
	pod := apply(t, shared(t), podName(t), counter{})
	_, err := shared(t).Checkpoint(t.Context(), pod.Metadata.Name, "nobody", 0)
	isStatus(t, err, http.StatusNotFound, "container nobody does not exist")
	_, err = shared(t).Checkpoint(t.Context(), "nobody", "counter", 0)
	isStatus(t, err, http.StatusNotFound, "pod does not exist")
	expect(t, pod, counterPort, "101")
}

// What cannot be checkpointed is refused with the reason, and goes on: here a
// program with managed memory.
func TestRefused(t *testing.T) {
	results.Add(t)
	pod := apply(t, shared(t), podName(t), counter{workload: "managed"})
	expect(t, pod, counterPort, "101")
	_, err := shared(t).Checkpoint(t.Context(), pod.Metadata.Name, "counter", 0)
	isStatus(t, err, http.StatusInternalServerError, "not supported")
	expect(t, pod, counterPort, "102")
}

// A pod that is being deleted meanwhile: the deletion is not held up, and the
// checkpoint is whole or has failed.
func TestDeletedMeanwhile(t *testing.T) {
	results.Add(t)
	softwareGPU(t, shared(t), "checkpoint_delay_ms=1500\n")
	name := podName(t)
	pod := apply(t, shared(t), name, counter{})
	expect(t, pod, counterPort, "101")
	type answer struct {
		archive string
		err     error
	}
	done := make(chan answer, 1)
	go func() {
		archive, err := shared(t).Checkpoint(t.Context(), name, "counter", 0)
		done <- answer{archive, err}
	}()
	locked(t, shared(t), pod)
	if _, err := shared(t).Kubectl(t.Context(), "delete", "pod", name, "--timeout=180s"); err != nil {
		t.Fatal(err)
	}
	got := <-done
	if got.err == nil {
		holdsGPUState(t, got.archive)
	} else if code := statusOf(got.err); code != http.StatusInternalServerError && code != http.StatusNotFound {
		t.Errorf("the kubelet answered %v", got.err)
	}
	t.Logf("the checkpoint: %v", got.err)
	_, err := shared(t).Checkpoint(t.Context(), name, "counter", 0)
	isStatus(t, err, http.StatusNotFound, "pod does not exist")
}

// The kubelet gives up after its time-out, and the pod goes on.
func TestTimeout(t *testing.T) {
	results.Add(t)
	if gpu.Kind != harness.SoftwareGPU {
		t.Skip("only the software GPU can be told to take its time")
	}
	n := own(t, node.Options{KubeletConfig: "runtimeRequestTimeout: 25s\n"})
	name := podName(t)
	pod, err := n.RunStatic(t.Context(), name, counter{}.manifest(name))
	if err != nil {
		t.Fatal(err)
	}
	expect(t, pod, counterPort, "101")
	softwareGPU(t, n, "checkpoint_delay_ms=30000\n")
	_, err = n.Checkpoint(t.Context(), pod.Metadata.Name, "counter", 0)
	isStatus(t, err, http.StatusInternalServerError, "DeadlineExceeded")
	expect(t, pod, counterPort, "102")
	if err := n.SetSoftwareGPU(""); err != nil {
		t.Fatal(err)
	}
	archive, err := n.Checkpoint(t.Context(), pod.Metadata.Name, "counter", 0)
	if err != nil {
		t.Fatal(err)
	}
	holdsGPUState(t, archive)
	expect(t, pod, counterPort, "103")
}

// A client that hangs up ends the checkpoint, and the pod goes on.
func TestHangUp(t *testing.T) {
	results.Add(t)
	hurry := softwareGPU(t, shared(t), "checkpoint_delay_ms=20000\n")
	pod := apply(t, shared(t), podName(t), counter{})
	expect(t, pod, counterPort, "101")
	ctx, hangUp := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := shared(t).Checkpoint(ctx, pod.Metadata.Name, "counter", 0)
		done <- err
	}()
	locked(t, shared(t), pod)
	hangUp()
	if err := <-done; err == nil {
		t.Error("the checkpoint was done before the client hung up")
	}
	hurry()
	expect(t, pod, counterPort, "102")
}

// locked waits until a pod's checkpoint has begun: its counter does not answer.
func locked(t *testing.T, n *node.Node, pod node.Pod) {
	t.Helper()
	id := pod.Container("counter")
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		// The shim makes the directory of what it saves before it asks the driver.
		dirs, _ := filepath.Glob(filepath.Join(n.Dir(), "root", "io.containerd.grpc.v1.cri", "containers", id, "ctrd-checkpoint"))
		if len(dirs) > 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the checkpoint does not begin")
		}
	}
}

// paused waits until a pod's container is paused: from then on a second checkpoint
// does not try to pause it.
func paused(t *testing.T, n *node.Node, pod node.Pod) {
	t.Helper()
	c, err := n.Client().LoadContainer(t.Context(), pod.Container("counter"))
	if err != nil {
		t.Fatal(err)
	}
	task, err := c.Task(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		status, err := task.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if status.Status == client.Paused {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the container is not paused")
		}
	}
}

// holdsGPUState checks that an archive is a whole checkpoint with GPU state.
func holdsGPUState(t *testing.T, archive string) {
	t.Helper()
	files := readArchive(t, archive)
	for _, name := range []string{"config.dump", "spec.dump", "status.dump", "rootfs-diff.tar"} {
		if _, ok := files[name]; !ok {
			t.Errorf("%s has no %s", archive, name)
		}
	}
	m := readMetadata(t, archive)
	for _, process := range m.Processes {
		for _, area := range process.Areas {
			if size := files["checkpoint/"+area.File]; size < int64(area.Offset+area.Bytes) {
				t.Errorf("%s has %d bytes of %s, want %d", archive, size, area.File, area.Offset+area.Bytes)
			}
		}
	}
	info, err := os.Stat(archive)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		t.Errorf("%s has mode %v: it holds memory", archive, info.Mode())
	}
}
