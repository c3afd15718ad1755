// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"encoding/json"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/docs/commands"
	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
)

// The command of docs/cli.md takes all containers of a kubelet's pod in one cut, by the pod's
// namespace and name, and a pod of the images continues. A pod that is not there is named.
func TestPodByCommand(t *testing.T) {
	results.Add(t)
	pod := func(name string, annotations map[string]string, images map[string]string) node.Pod {
		var containers []any
		for i, container := range []string{"first", "second"} {
			containers = append(containers, map[string]any{
				"name": container, "image": images[container], "imagePullPolicy": "IfNotPresent",
				"args":      []string{"counter", "--port", strconv.Itoa(counterPort + i)},
				"resources": map[string]any{"limits": map[string]any{node.Resource: "1"}},
			})
		}
		return apply(t, shared(t), name, counter{class: "gpuckpt", restart: "Never", annotations: annotations, pod: map[string]any{"containers": containers}})
	}
	p := pod("trainer", nil, map[string]string{"first": harness.WorkloadImage, "second": harness.WorkloadImage})
	expect(t, p, counterPort, "101")
	expect(t, p, counterPort+1, "101")
	expect(t, p, counterPort+1, "102")

	line := ""
	lines, err := commands.Of(filepath.Join(sourceDir(t), "docs", "cli.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range lines {
		if strings.Contains(l.Text, "--pod default/trainer") {
			line = l.Text
		}
	}
	if line == "" {
		t.Fatal("cli.md has no such command")
	}
	if node.PodNamespace != "default" {
		t.Fatalf("the tests' pods are in %s", node.PodNamespace)
	}
	args := append(strings.Fields(line)[1:], "--address", shared(t).Address(), "--image-path", filepath.Join(shared(t).Dir(), "dumps"), "--quiet", "--json")
	other := make([]string, len(args))
	for i, a := range args {
		other[i] = strings.Replace(a, "default/trainer", "default/nobody", 1)
	}
	_, err = shared(t).Output(t.Context(), "gpuckpt", other...)
	harness.Says(t, err, "default/nobody")
	expect(t, p, counterPort, "102")

	out, err := shared(t).Output(t.Context(), "gpuckpt", args...)
	if err != nil {
		t.Fatalf("%v\n%s", err, shared(t).LogTail(4000))
	}
	var made struct {
		Containers []struct{ Name, Image string }
	}
	if err := json.Unmarshal([]byte(out), &made); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	images := make(map[string]string)
	for _, m := range made.Containers {
		images[m.Name] = m.Image
	}
	if len(images) != 2 || images["first"] != "example.com/job:1-first" || images["second"] != "example.com/job:1-second" {
		t.Fatalf("made were %v", images)
	}
	for _, image := range images {
		t.Cleanup(func() {
			if err := shared(t).RemoveImage(t.Context(), image); err != nil {
				t.Log(err)
			}
		})
	}
	// Without --leave-running they have ended with their checkpoint.
	if _, err := shared(t).WaitFor(t.Context(), "trainer", func(p node.Pod) bool { return p.Status.Phase == "Failed" }); err != nil {
		t.Fatal(err)
	}
	r := pod("trainer-again", restoring, images)
	expect(t, r, counterPort, "103")
	expect(t, r, counterPort+1, "103")
}
