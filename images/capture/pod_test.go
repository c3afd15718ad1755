// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package capture

import (
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/namespaces"
)

func TestPodTargets(t *testing.T) {
	container := func(id, name, namespace, uid string) containers.Container {
		return containers.Container{ID: id, Labels: map[string]string{labelContainer: name, labelNamespace: namespace, labelUID: uid}}
	}
	ctx := namespaces.WithNamespace(t.Context(), "k8s.io")
	targets, err := podTargets(ctx, []containers.Container{container("1", "b", "ns", "u"), container("2", "a", "ns", "u")}, "pod", "r/job:1", "r/job:0")
	if err != nil || len(targets) != 2 || targets[0] != (Target{ID: "2", Image: "r/job:1-a", Previous: "r/job:0-a"}) || targets[1].ID != "1" {
		t.Errorf("got %+v, %v", targets, err)
	}
	for says, found := range map[string][]containers.Container{
		"no container of a pod job runs in containerd's namespace k8s.io": nil,
		"in the namespaces ns and other: say which":                       {container("1", "a", "ns", "u"), container("2", "b", "other", "v")},
	} {
		if _, err := podTargets(ctx, found, "job", "r/job:1", ""); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("got %v, want %q", err, says)
		}
	}
}
