// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"path/filepath"
	"slices"
	"testing"

	"github.com/containerd/containerd/v2/core/content"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
)

// A kubelet whose CRI has gpuckpt's snapshotter runs a pod of a checkpoint image without any GPU state
// in the content store. The pod's pull secret opens the registry for CRI, and the snapshotter's own
// credentials for the snapshotter.
func TestSnapshotter(t *testing.T) {
	result := results.Add(t)
	var s *harness.Snapshotter
	t.Cleanup(func() { s.Stop() }) // after the node
	n := own(t, node.Options{APIServer: true, ConfigIn: func(dir string) string {
		var err error
		if s, err = harness.StartSnapshotter(bins, dir, []string{"DOCKER_CONFIG=" + filepath.Join(dir, "docker")}, "--plain-http"); err != nil {
			t.Fatal(err)
		}
		return s.Config()
	}})
	const gpuBytes = 192 << 20
	name := podName(t)
	old := apply(t, n, name+"-old", counter{workload: "pattern", args: []string{"--bytes", "201326592", "--seed", "7"}})
	expect(t, old, counterPort, "101")
	archive, err := n.Checkpoint(t.Context(), old.Metadata.Name, "counter", 0)
	if err != nil {
		t.Fatalf("%v\n%s", err, n.LogTail(4000))
	}
	had := imageNames(t, n)
	ref := publish(t, n, archive, name+":1")
	for _, more := range imageNames(t, n) {
		if !slices.Contains(had, more) { // CRI has given it another name
			if err := n.RemoveImage(t.Context(), more); err != nil {
				t.Fatal(err)
			}
		}
	}
	if dir := credentialsDir(n); dir != filepath.Join(n.Dir(), "docker") {
		t.Fatalf("the snapshotter does not find the credentials in %s", dir)
	}
	before := storeBytes(t, n)
	var pod node.Pod
	if err := result.Time("run", func() error {
		pod = apply(t, n, name, counter{image: ref, annotations: restoring, pod: map[string]any{"imagePullSecrets": []any{map[string]any{"name": pullSecret}}}})
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if answer := ask(t, pod, counterPort, "verify"); answer != "bad=0" {
		t.Errorf("the pod's GPU memory: %s", answer)
	}
	expect(t, pod, counterPort, "102")
	if grown := storeBytes(t, n) - before; grown <= 0 || grown > gpuBytes/2 {
		t.Errorf("the content store has %d bytes more, with %d of GPU memory: the snapshotter did not fetch its own", grown, int64(gpuBytes))
	}
}

func imageNames(t *testing.T, n *node.Node) (names []string) {
	t.Helper()
	list, err := n.Client().ImageService().List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range list {
		names = append(names, i.Name)
	}
	return names
}

// storeBytes returns what a node's content store holds.
func storeBytes(t *testing.T, n *node.Node) (bytes int64) {
	t.Helper()
	err := n.Client().ContentStore().Walk(t.Context(), func(i content.Info) error {
		bytes += i.Size
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return bytes
}
