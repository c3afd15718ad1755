// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"encoding/json"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
)

// deploy/agent in a cluster whose kubelet asks the API server who may what: a Checkpoint object has a
// GPU pod checkpointed by the account's one right at the kubelet, and pushed with a named secret. A
// pod of that image continues. What the driver refuses is told by the object, and the pod runs on.
func TestCheckpointObject(t *testing.T) {
	results.Add(t)
	needs(t, "gpuckpt-agent")
	needs(t, "kube-controller-manager")
	n := own(t, node.Options{APIServer: true, Controllers: true, KubeletAsks: true})
	kubectl := func(args ...string) string {
		t.Helper()
		out, err := n.Kubectl(t.Context(), args...)
		if err != nil {
			logs, _ := n.Kubectl(t.Context(), "logs", "--namespace", "gpuckpt", "daemonset/gpuckpt-agent")
			t.Fatalf("%v\nthe agent says\n%s\n%s", err, logs, n.LogTail(2000))
		}
		return out
	}
	go func() {
		if err := n.Schedule(t.Context()); err != nil {
			t.Errorf("the scheduler: %v", err)
		}
	}()
	importAgent(t, n)
	givePullSecret(t, n)
	kubectl("create", "namespace", "gpuckpt")
	kubectl("apply", "-k", filepath.Join(sourceDir(t), "deploy", "agent"))
	gpuckpt, err := bins.Path("gpuckpt")
	if err != nil {
		t.Fatal(err)
	}
	host, port, err := net.SplitHostPort(n.APIAddress())
	if err != nil {
		t.Fatal(err)
	}
	// What a test's node has elsewhere.
	patch, err := json.Marshal([]any{
		map[string]any{"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": []string{
			"--kubelet=" + n.KubeletURL(), "--containerd=" + n.Address(), "--gpuckpt=" + gpuckpt, "--plain-http", "--env=GPUCKPT_CONFIG=" + n.ShimConfigPath(),
		}},
		map[string]any{"op": "add", "path": "/spec/template/spec/containers/0/env/-", "value": map[string]any{"name": "KUBERNETES_SERVICE_HOST", "value": host}},
		map[string]any{"op": "add", "path": "/spec/template/spec/containers/0/env/-", "value": map[string]any{"name": "KUBERNETES_SERVICE_PORT", "value": port}},
	})
	if err != nil {
		t.Fatal(err)
	}
	kubectl("patch", "--namespace", "gpuckpt", "daemonset", "gpuckpt-agent", "--type=json", "--patch", string(patch))
	kubectl("label", "node", node.Name, "nvidia.com/gpu.present=true")
	kubectl("rollout", "status", "--namespace", "gpuckpt", "daemonset/gpuckpt-agent", "--timeout=60s")
	for what, want := range map[string]string{
		"create nodes --subresource=checkpoint": "yes", "create nodes --subresource=proxy": "no", "get nodes --subresource=proxy": "no", "list secrets": "no", "create pods": "no",
	} {
		out, err := n.Kubectl(t.Context(), append([]string{"auth", "can-i", "--as=system:serviceaccount:gpuckpt:gpuckpt-agent"}, strings.Fields(what)...)...)
		got := strings.TrimSpace(out)
		if err != nil { // kubectl's way to say no
			got = "no"
		}
		if got != want {
			t.Errorf("may the agent %s? %s, want %s: %v", what, got, want, err)
		}
	}

	object := func(name, pod string) {
		t.Helper()
		if err := n.Apply(t.Context(), fmt.Sprintf("{apiVersion: gpuckpt.dev/v1alpha1, kind: Checkpoint, metadata: {name: %s}, spec: {pod: %s, repository: %s/job, pushSecret: %s}}",
			name, pod, n.Registry().Host, pullSecret)); err != nil {
			t.Fatal(err)
		}
	}
	first := apply(t, n, "first", counter{})
	expect(t, first, counterPort, "101")
	object("first", "first")
	kubectl("wait", "--for=condition=Complete", "checkpoint/first", "--timeout=60s")
	var made struct {
		Status struct {
			Phase, Node string
			Containers  []struct {
				Name, Image, Digest     string
				Bytes, GPUBytes, Pushed int64
				Checkpoint, Build, Push string
			}
		}
	}
	if err := json.Unmarshal([]byte(kubectl("get", "checkpoint", "first", "--output", "json")), &made); err != nil {
		t.Fatal(err)
	}
	if s := made.Status; s.Phase != "Succeeded" || s.Node != node.Name || len(s.Containers) != 1 || s.Containers[0].GPUBytes == 0 || s.Containers[0].Pushed == 0 || !strings.HasPrefix(s.Containers[0].Digest, "sha256:") {
		t.Fatalf("%+v", s)
	}
	t.Logf("%+v", made.Status.Containers)
	expect(t, first, counterPort, "102") // it runs on
	if left, err := filepath.Glob(filepath.Join(n.Dir(), "kubelet", "checkpoints", "*")); err != nil || len(left) > 0 {
		t.Errorf("left are %v, %v", left, err)
	}
	second := apply(t, n, "second", counter{
		image: made.Status.Containers[0].Image + "@" + made.Status.Containers[0].Digest, annotations: restoring,
		pod: map[string]any{"imagePullSecrets": []any{map[string]any{"name": pullSecret}}},
	})
	expect(t, second, counterPort, "102")

	refused := apply(t, n, "refused", counter{workload: "managed"})
	expect(t, refused, counterPort, "101")
	object("refused", "refused")
	kubectl("wait", "--for=condition=Failed", "checkpoint/refused", "--timeout=60s")
	if why := kubectl("get", "checkpoint", "refused", "--output", "jsonpath={.status.conditions[0].reason}: {.status.conditions[0].message}"); !strings.Contains(why, "CheckpointFailed") || !strings.Contains(why, "not supported") {
		t.Errorf("it says %s", why)
	}
	harness.Within(t, "the event is there", func() bool {
		out, err := n.Kubectl(t.Context(), "get", "events", "--field-selector", "involvedObject.kind=Checkpoint,reason=CheckpointFailed", "--output", "name")
		return err == nil && out != ""
	})
	expect(t, refused, counterPort, "102")

	kubectl("delete", "pod", "first", "second", "refused") // there are two GPUs
	inTurns := func(name string, annotations map[string]string, images ...string) node.Pod {
		var containers []any
		for i, image := range images {
			containers = append(containers, map[string]any{
				"name": fmt.Sprint("place", i), "image": image, "imagePullPolicy": "IfNotPresent",
				"args":      []string{"turns", "--port", strconv.Itoa(counterPort + i), "--file", "/dev/shm/count", "--start", strconv.Itoa(i)},
				"resources": map[string]any{"limits": map[string]any{node.Resource: "1"}},
			})
		}
		return apply(t, n, name, counter{annotations: annotations, pod: map[string]any{
			"containers": containers, "imagePullSecrets": []any{map[string]any{"name": pullSecret}},
		}})
	}
	pair := inTurns("pair", nil, harness.WorkloadImage, harness.WorkloadImage)
	countOn(t, pair, 2)
	object("pair", "pair")
	kubectl("wait", "--for=condition=Complete", "checkpoint/pair", "--timeout=120s")
	countOn(t, pair, 2)
	images := strings.Fields(kubectl("get", "checkpoint", "pair", "--output", "jsonpath={.status.containers[*].image}"))
	if len(images) != 2 || !strings.HasSuffix(images[0], ":pair-place0") || !strings.HasSuffix(images[1], ":pair-place1") {
		t.Fatalf("made were %q", images)
	}
	kubectl("delete", "pod", "pair")
	countOn(t, inTurns("pair-again", restoring, images...), 2)
}

// countOn waits until each container of a pod has seen ten turns more of programs that count in turns
// in /dev/shm. It fails the test if one finds that the count is not that of its GPU.
func countOn(t *testing.T, pod node.Pod, containers int) {
	t.Helper()
	for i := range containers {
		first := -1
		harness.Within(t, "the programs count on", func() bool {
			answer := ask(t, pod, counterPort+i, "count")
			now, err := strconv.Atoi(answer)
			if err != nil {
				t.Fatalf("container %d: %s", i, answer)
			}
			if first < 0 {
				first = now
			}
			return now > first+10
		})
	}
}

// importAgent makes the part of the image for nodes that deploy/agent runs.
func importAgent(t *testing.T, n *node.Node) {
	t.Helper()
	program, err := bins.Path("gpuckpt-agent")
	if err != nil {
		t.Fatalf("%v; run `make agent`", err)
	}
	image, err := harness.BuildImage(t.Context(), harness.ImageSpec{Files: map[string]string{"/opt/gpuckpt/agent/gpuckpt-agent": program}})
	if err == nil {
		err = n.Import(t.Context(), nodeImage, image)
	}
	if err != nil {
		t.Fatal(err)
	}
}
