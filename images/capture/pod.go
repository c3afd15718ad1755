// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package capture

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/containerd/api/services/tasks/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
)

// The labels by which the kubelet knows its containers, and the one by which containerd's CRI service
// tells a pod's containers from the pod's sandbox.
const (
	labelContainer = "io.kubernetes.container.name"
	labelPod       = "io.kubernetes.pod.name"
	labelNamespace = "io.kubernetes.pod.namespace"
	labelUID       = "io.kubernetes.pod.uid"
	labelKind      = "io.cri-containerd.kind"
)

// PodOf returns the namespace, the pod and the name of a container of a pod of Kubernetes', by its labels:
// NAMESPACE/POD/NAME, and "" for any other container.
func PodOf(labels map[string]string) string {
	if labels[labelPod] == "" {
		return ""
	}
	return strings.TrimSuffix(strings.Join([]string{labels[labelNamespace], labels[labelPod], labels[labelContainer]}, "/"), "/")
}

// Pod returns containers of a pod of Kubernetes' by its name, or NAMESPACE/NAME, in the order of
// their names: those that are named, or all. Their images are to be called as image and previous are,
// with "-" and the container's name behind unless one is named alone; an empty previous stays empty.
// ctx carries containerd's namespace. It leaves out containers that do not run, if that is asked for. A named
// container that is not there is an error.
func Pod(ctx context.Context, c *client.Client, pod string, names []string, image, previous string, running bool) ([]Target, error) {
	filter := fmt.Sprintf("labels.%q==%q,labels.%q==container", labelPod, pod, labelKind)
	if namespace, name, ok := strings.Cut(pod, "/"); ok {
		filter = fmt.Sprintf("labels.%q==%q,labels.%q==%q,labels.%q==container", labelPod, name, labelNamespace, namespace, labelKind)
	}
	found, err := c.ContainerService().List(ctx, filter)
	if err != nil {
		return nil, fmt.Errorf("look for the containers of the pod %s: %w", pod, err)
	}
	if !running {
		return podTargets(ctx, found, pod, names, image, previous, running)
	}
	list, err := c.TaskService().List(ctx, &tasks.ListTasksRequest{})
	if err != nil {
		return nil, fmt.Errorf("look for the containers of the pod %s: %w", pod, errgrpc.ToNative(err))
	}
	found = slices.DeleteFunc(found, func(k containers.Container) bool {
		return !slices.ContainsFunc(list.Tasks, func(t *tasktypes.Process) bool {
			return t.ID == k.ID && (t.Status == tasktypes.Status_RUNNING || t.Status == tasktypes.Status_PAUSED)
		})
	})
	return podTargets(ctx, found, pod, names, image, previous, running)
}

// podTargets makes the targets of a pod's containers. Those that do not run may be of one before it, of its name.
func podTargets(ctx context.Context, found []containers.Container, pod string, names []string, image, previous string, running bool) ([]Target, error) {
	namespace, _ := namespaces.Namespace(ctx)
	does := map[bool]string{true: "runs", false: "is"}[running]
	if len(found) == 0 {
		hint := ""
		if namespace != "k8s.io" {
			hint = " (Kubernetes uses --namespace k8s.io)"
		}
		return nil, fmt.Errorf("no container of a pod %s %s in containerd's namespace %s of this node%s: %w", pod, does, namespace, hint, errdefs.ErrNotFound)
	}
	slices.SortFunc(found, func(a, b containers.Container) int {
		return strings.Compare(a.Labels[labelContainer], b.Labels[labelContainer])
	})
	for _, name := range names {
		if !slices.ContainsFunc(found, func(k containers.Container) bool { return k.Labels[labelContainer] == name }) {
			return nil, fmt.Errorf("no container %s of the pod %s %s in containerd's namespace %s of this node: %w", name, pod, does, namespace, errdefs.ErrNotFound)
		}
	}
	targets := make([]Target, 0, len(found))
	for _, k := range found {
		if k.Labels[labelNamespace] != found[0].Labels[labelNamespace] || running && k.Labels[labelUID] != found[0].Labels[labelUID] {
			return nil, fmt.Errorf("there are pods %s in the namespaces %s and %s: say which, as NAMESPACE/%s: %w",
				pod, found[0].Labels[labelNamespace], k.Labels[labelNamespace], pod, errdefs.ErrInvalidArgument)
		}
		switch name := k.Labels[labelContainer]; {
		case len(names) == 1 && name == names[0]:
			targets = append(targets, Target{ID: k.ID, Image: image, Previous: previous})
		case len(names) == 0 || slices.Contains(names, name):
			targets = append(targets, NewTarget(k.ID, name, image, previous))
		}
	}
	return targets, nil
}

// NewTarget returns a container of several, whose images are called as image and previous are, with
// "-" and its name behind.
func NewTarget(id, name, image, previous string) Target {
	t := Target{ID: id, Image: image + "-" + name}
	if previous != "" {
		t.Previous = previous + "-" + name
	}
	return t
}
