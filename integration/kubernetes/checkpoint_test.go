// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"fmt"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
)

// counterPort is where counters listen that have a network of their own.
const counterPort = 5000

// counterPod is a pod with a counter in GPU memory.
func counterPod(name string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  containers:
  - name: counter
    image: %s
    imagePullPolicy: Never
    args: [counter, --port, "%d"]
    resources: {limits: {%s: 1}}
`, name, harness.WorkloadImage, counterPort, node.Resource)
}

// The kubelet's checkpoint of a GPU pod: an archive, and the pod goes on.
func TestCheckpoint(t *testing.T) {
	name := podName(t)
	pod := runPod(t, shared, name, counterPod(name))
	expect(t, pod, counterPort, "101")
	archive, err := shared.Checkpoint(t.Context(), pod.Metadata.Name, "counter", 0)
	if err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(4000))
	}
	t.Log(archive)
	expect(t, pod, counterPort, "102")
}
