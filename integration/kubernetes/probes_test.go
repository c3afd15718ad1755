// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"strconv"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
)

// A suspended container answers no probe. Those that are an exec are refused, and the kubelet throws
// such a result away: it lets the container be for as long as it is suspended.
func TestSuspendedProbes(t *testing.T) {
	results.Add(t)
	name := podName(t)
	pod := apply(t, shared(t), name, counter{restart: "Always", container: map[string]any{
		"livenessProbe": map[string]any{"periodSeconds": 1, "failureThreshold": 3, "exec": map[string]any{"command": []string{"/usr/bin/gpuwork", "exit", "0"}}},
	}})
	expect(t, pod, counterPort, "101")
	gpuckpt := func(verb string) {
		t.Helper()
		if _, err := shared(t).Output(t.Context(), "gpuckpt", verb, "--address", shared(t).Address(), "--namespace", node.Namespace, pod.Container("counter")); err != nil {
			t.Fatalf("%v\n%s", err, shared(t).LogTail(3000))
		}
	}
	gpuckpt("suspend")
	said := ""
	within(t, "the kubelet has probed more often than it tolerates failures", func() bool {
		out, err := shared(t).Kubectl(t.Context(), "get", "events", "--field-selector", "involvedObject.name="+name+",reason=Unhealthy", "--output", `jsonpath={range .items[*]}{.count} {.message}{"\n"}{end}`)
		if err != nil {
			t.Fatal(err)
		}
		probes := 0
		for line := range strings.Lines(out) {
			count, message, _ := strings.Cut(line, " ")
			if n, err := strconv.Atoi(count); err == nil && strings.HasPrefix(message, "Liveness probe errored") {
				probes += n
			}
		}
		said = out
		return probes > 5
	})
	t.Log(said)
	gpuckpt("resume")
	expect(t, pod, counterPort, "102")
	now, err := shared(t).Pod(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	if s := now.Status.ContainerStatuses[0]; s.RestartCount != 0 || s.ContainerID != pod.Status.ContainerStatuses[0].ContainerID {
		t.Errorf("the container was restarted: %+v", s)
	}
}
