// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package capture

import (
	"reflect"
	"slices"
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
	targets, err := podTargets(ctx, []containers.Container{container("1", "b", "ns", "u"), container("2", "a", "ns", "u")}, "pod", nil, "r/job:1", "r/job:0", true)
	if err != nil || len(targets) != 2 || !reflect.DeepEqual(targets[0], Target{ID: "2", Image: "r/job:1-a", Previous: "r/job:0-a"}) || targets[1].ID != "1" {
		t.Errorf("got %+v, %v", targets, err)
	}
	three := []containers.Container{container("1", "b", "ns", "u"), container("2", "a", "ns", "u"), container("3", "c", "ns", "u")}
	for _, named := range []struct {
		names []string
		want  []Target
	}{
		{[]string{"b"}, []Target{{ID: "1", Image: "r/job:1", Previous: "r/job:0"}}}, // alone, it has the tag
		{[]string{"c", "b"}, []Target{{ID: "1", Image: "r/job:1-b", Previous: "r/job:0-b"}, {ID: "3", Image: "r/job:1-c", Previous: "r/job:0-c"}}},
	} {
		if got, err := podTargets(ctx, slices.Clone(three), "pod", named.names, "r/job:1", "r/job:0", true); err != nil || !reflect.DeepEqual(got, named.want) {
			t.Errorf("of %q got %+v, %v", named.names, got, err)
		}
	}
	if _, err := podTargets(ctx, slices.Clone(three), "pod", []string{"a", "d"}, "r/job:1", "", true); err == nil || !strings.Contains(err.Error(), "no container d of the pod pod runs") {
		t.Errorf("got %v", err)
	}
	if _, err := podTargets(namespaces.WithNamespace(ctx, "default"), nil, "job", nil, "", "", true); err == nil || !strings.Contains(err.Error(), "--namespace k8s.io") {
		t.Errorf("got %v", err)
	}
	// All that do not run are meant, also those of an earlier pod.
	if got, err := podTargets(ctx, []containers.Container{container("1", "a", "ns", "u"), container("2", "a", "ns", "v")}, "pod", []string{"a"}, "", "", false); err != nil || len(got) != 2 {
		t.Errorf("got %+v, %v", got, err)
	}
	for says, found := range map[string][]containers.Container{
		"no container of a pod job runs in containerd's namespace k8s.io": nil,
		"in the namespaces ns and other: say which":                       {container("1", "a", "ns", "u"), container("2", "b", "other", "v")},
	} {
		if _, err := podTargets(ctx, found, "job", nil, "r/job:1", "", true); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("got %v, want %q", err, says)
		}
	}
}
