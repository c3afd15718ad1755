// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
)

// counterPort is where counters listen that have a network of their own.
const counterPort = 5000

// counter describes a pod with a counter in GPU memory. The zero value is one with
// a network of its own and the node's own runtime.
type counter struct {
	class       string // runtime class
	image       string // empty: the workload's
	workload    string // empty: "counter"
	args        []string
	restart     string // restart policy
	annotations map[string]string
	hostNetwork bool
	port        int            // empty: counterPort
	pod         map[string]any // more of the pod's spec, and
	container   map[string]any // of the container's
	meta        map[string]any // and of the pod's metadata
}

// manifest is the pod as JSON.
func (c counter) manifest(name string) string {
	if c.image == "" {
		c.image = harness.WorkloadImage
	}
	if c.workload == "" {
		c.workload = "counter"
	}
	if c.port == 0 {
		c.port = counterPort
	}
	container := map[string]any{
		"name": "counter", "image": c.image, "imagePullPolicy": "IfNotPresent",
		"args":      append([]string{c.workload, "--port", strconv.Itoa(c.port)}, c.args...),
		"resources": map[string]any{"limits": map[string]any{node.Resource: "1"}},
	}
	maps.Copy(container, c.container)
	spec := map[string]any{
		"nodeName": node.Name, "terminationGracePeriodSeconds": 1, "dnsPolicy": "Default",
		"containers": []any{container},
	}
	if c.class != "" {
		spec["runtimeClassName"] = c.class
	}
	if c.restart != "" {
		spec["restartPolicy"] = c.restart
	}
	if c.hostNetwork {
		spec["hostNetwork"] = true
	}
	maps.Copy(spec, c.pod)
	meta := map[string]any{"name": name, "namespace": node.PodNamespace, "annotations": c.annotations}
	maps.Copy(meta, c.meta)
	data, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
	if err != nil {
		panic(err) // it is made of strings and maps
	}
	return string(data)
}

// podName makes a pod's name of the test's.
func podName(t *testing.T) string {
	return strings.TrimPrefix(harness.Name(t), "test")
}

// apply has the API server run a pod, deleted when the test ends, and waits until it
// is ready.
func apply(t *testing.T, n *node.Node, name string, c counter) node.Pod {
	t.Helper()
	removed(t, n, name)
	if err := n.Apply(t.Context(), c.manifest(name)); err != nil {
		t.Fatal(err)
	}
	pod, err := n.WaitReady(t.Context(), name)
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, n.KubeletLog(4000), n.LogTail(4000))
	}
	return pod
}

// removed deletes a pod when the test ends.
func removed(t *testing.T, n *node.Node, name string) {
	t.Helper()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if _, err := n.Kubectl(ctx, "delete", "pod", name, "--ignore-not-found", "--timeout=110s"); err != nil {
			t.Error(err)
		}
	})
}

// has says whether a program is there. All are, but in a bundle, which has to be
// small.
func has(program string) bool {
	_, err := bins.Path(program)
	return err == nil
}

// needs skips a test in a bundle that has not the program; in the tree the test
// fails without it.
func needs(t *testing.T, program string) {
	t.Helper()
	if has(program) {
		return
	}
	if os.Getenv("GPUCKPT_SOURCE") == "" {
		t.Fatalf("%s is not there; run `make setup-kubernetes agent`", program)
	}
	t.Skip(program + " is not in the bundle")
}

// own starts a node for one test.
func own(t *testing.T, opts node.Options) *node.Node {
	t.Helper()
	n, err := newNode(session.Context(), opts) // t.Context() ends before what is in it can be removed
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Stop(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// softwareGPU tells the software GPU what to do differently until the test ends, or
// until undo is called. A real GPU cannot be told: there it does what it does.
func softwareGPU(t *testing.T, n *node.Node, lines string) (undo func()) {
	t.Helper()
	if gpu.Kind == harness.SoftwareGPU {
		return n.SoftwareGPU(t, lines)
	}
	return func() {}
}

// ask asks the program of a pod and gives the answer, or fails the test.
func ask(t *testing.T, pod node.Pod, port int, question string) string {
	t.Helper()
	answer, err := harness.Ask(t.Context(), net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(port)), question)
	if err != nil {
		t.Fatal(err)
	}
	return answer
}

func expect(t *testing.T, pod node.Pod, port int, want string) {
	t.Helper()
	if got := ask(t, pod, port, "count"); got != want {
		t.Fatalf("the counter is %q, want %q", got, want)
	}
}

// statusOf is the code of an answer of the kubelet's, 0 for another error.
func statusOf(err error) int {
	if status, ok := errors.AsType[*node.StatusError](err); ok {
		return status.Code
	}
	return 0
}

// isStatus checks that the kubelet refused, with that code and those words.
func isStatus(t *testing.T, err error, code int, words string) {
	t.Helper()
	if statusOf(err) != code || !strings.Contains(fmt.Sprint(err), words) {
		t.Errorf("the kubelet answered %v; want status %d with %q", err, code, words)
	}
}
