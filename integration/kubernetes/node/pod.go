// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/images"
)

// PodNamespace is the Kubernetes namespace of the pods.
const PodNamespace = "default"

// podLimit bounds the wait for a pod that the context does not bound.
const podLimit = 3 * time.Minute

// Pod is a pod as the kubelet has it.
type Pod struct {
	Metadata struct {
		Name              string
		UID               string
		DeletionTimestamp string
	}
	Status struct {
		Phase             string
		Reason, Message   string
		PodIP             string
		ContainerStatuses []ContainerStatus
	}
}

// ContainerStatus is a container's part in a pod.
type ContainerStatus struct {
	Name         string
	ContainerID  string // "containerd://ID"
	Image        string
	Ready        bool
	RestartCount int
	State        struct {
		Waiting *struct{ Reason, Message string }
		Running *struct{ StartedAt string }
	}
}

// RunStatic gives the kubelet a static pod, in YAML or JSON, and waits until its
// containers are ready. The kubelet puts the node's name behind the pod's.
func (n *Node) RunStatic(ctx context.Context, name, manifest string) (Pod, error) {
	next := filepath.Join(n.Dir(), "next-pod-"+name)
	err := os.WriteFile(next, []byte(manifest), 0o600)
	if err == nil {
		err = os.Rename(next, n.manifest(name)) // the kubelet reads no half of it
	}
	if err != nil {
		return Pod{}, fmt.Errorf("run the pod %s: %w", name, err)
	}
	return n.WaitReady(ctx, staticName(name))
}

// staticName is the name of a static pod of a manifest with that name.
func staticName(name string) string { return name + "-" + Name }

func (n *Node) manifest(name string) string { return filepath.Join(n.podDir(), name+".yaml") }

// DeleteStatic takes a static pod away and waits until the kubelet has no trace of it.
func (n *Node) DeleteStatic(ctx context.Context, name string) error {
	if err := os.Remove(n.manifest(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("delete the pod %s: %w", name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, podLimit)
	defer cancel()
	for {
		_, err := n.Pod(ctx, staticName(name))
		if errors.Is(err, fs.ErrNotExist) {
			return n.waitForNoSandbox(ctx, staticName(name))
		}
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("delete the pod %s: %w", name, err)
		}
		if err := pause(ctx, 100*time.Millisecond); err != nil {
			return fmt.Errorf("delete the pod %s: %w", name, err)
		}
	}
}

// waitForNoSandbox waits until nothing of a pod runs.
func (n *Node) waitForNoSandbox(ctx context.Context, name string) error {
	for {
		left, err := n.running(ctx, name)
		if err == nil && left == 0 {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("wait for the end of the pod %s: %w", name, errors.Join(err, context.Cause(ctx)))
		}
		if err := pause(ctx, 100*time.Millisecond); err != nil {
			return fmt.Errorf("wait for the end of the pod %s: %w", name, err)
		}
	}
}

// running counts a pod's containers that have a process, its sandbox among them.
func (n *Node) running(ctx context.Context, pod string) (count int, err error) {
	list, err := n.Client().Containers(ctx, fmt.Sprintf("labels.%q==%s", "io.kubernetes.pod.name", pod))
	if err != nil {
		return 0, fmt.Errorf("list the containers of the pod %s: %w", pod, err)
	}
	for _, container := range list {
		if _, err := container.Task(ctx, nil); err == nil {
			count++
		}
	}
	return count, nil
}

// Pid is the first process of a container, as the host counts.
func (n *Node) Pid(ctx context.Context, container string) (int, error) {
	c, err := n.Client().LoadContainer(ctx, container)
	if err != nil {
		return 0, fmt.Errorf("find the container %s: %w", container, err)
	}
	task, err := c.Task(ctx, nil)
	if err != nil {
		return 0, fmt.Errorf("find the process of the container %s: %w", container, err)
	}
	return int(task.Pid()), nil
}

// RemoveImage removes an image, and what of it no other image has.
func (n *Node) RemoveImage(ctx context.Context, ref string) error {
	if err := n.Client().ImageService().Delete(ctx, ref, images.SynchronousDelete()); err != nil {
		return fmt.Errorf("remove the image %s: %w", ref, err)
	}
	return nil
}

// Pod is what the kubelet says of a pod. The error is fs.ErrNotExist when it knows
// none of that name.
func (n *Node) Pod(ctx context.Context, name string) (Pod, error) {
	body, err := n.kubelet.call(ctx, http.MethodGet, "/pods")
	if err != nil {
		return Pod{}, fmt.Errorf("list the pods: %w", err)
	}
	var list struct{ Items []Pod }
	if err := json.Unmarshal(body, &list); err != nil {
		return Pod{}, fmt.Errorf("list the pods: %w", err)
	}
	for _, pod := range list.Items {
		if pod.Metadata.Name == name {
			return pod, nil
		}
	}
	return Pod{}, fmt.Errorf("find the pod %s: %w", name, fs.ErrNotExist)
}

// WaitReady waits until all of a pod's containers are ready, for two minutes at
// most. The error says what state it is in.
func (n *Node) WaitReady(ctx context.Context, name string) (Pod, error) {
	return n.WaitFor(ctx, name, func(pod Pod) bool { return pod.Ready() })
}

// WaitFor waits until a pod is as wanted, for two minutes at most.
func (n *Node) WaitFor(ctx context.Context, name string, wanted func(Pod) bool) (Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, podLimit)
	defer cancel()
	for {
		pod, err := n.Pod(ctx, name)
		if err == nil && wanted(pod) {
			return pod, nil
		}
		if err := pause(ctx, 100*time.Millisecond); err != nil {
			state, _ := json.Marshal(pod.Status)
			return pod, fmt.Errorf("wait for the pod %s: %w: its state is %s", name, err, state)
		}
	}
}

// Ready says whether all of the pod's containers are.
func (p Pod) Ready() bool {
	for _, status := range p.Status.ContainerStatuses {
		if !status.Ready {
			return false
		}
	}
	return len(p.Status.ContainerStatuses) > 0
}

// Container is the id of the pod's container of that name, as containerd has it.
func (p Pod) Container(name string) string {
	for _, status := range p.Status.ContainerStatuses {
		if status.Name == name {
			return strings.TrimPrefix(status.ContainerID, "containerd://")
		}
	}
	return ""
}

// Checkpoint checkpoints a pod's container by the kubelet's API and gives the path
// of the archive. timeout is in seconds; 0 is the kubelet's own. An answer of the
// kubelet's that is no success is a *StatusError.
func (n *Node) Checkpoint(ctx context.Context, pod, container string, timeout int) (string, error) {
	path := "/checkpoint/" + url.PathEscape(PodNamespace) + "/" + url.PathEscape(pod) + "/" + url.PathEscape(container)
	if timeout > 0 {
		path += fmt.Sprintf("?timeout=%d", timeout)
	}
	body, err := n.kubelet.call(ctx, http.MethodPost, path)
	if err != nil {
		return "", fmt.Errorf("checkpoint the container %s of the pod %s: %w", container, pod, err)
	}
	var answer struct{ Items []string }
	if err := json.Unmarshal(body, &answer); err != nil || len(answer.Items) != 1 {
		return "", fmt.Errorf("checkpoint the container %s of the pod %s: the kubelet answered %q", container, pod, body)
	}
	return answer.Items[0], nil
}

// Crictl runs crictl on the node's containerd and gives its standard output.
func (n *Node) Crictl(ctx context.Context, args ...string) (string, error) {
	return n.Output(ctx, "crictl", append([]string{"--config", "/dev/null", "--runtime-endpoint", "unix://" + n.Address(), "--timeout", "60s"}, args...)...)
}
