// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"testing"
)

// An established TCP connection does not hinder a checkpoint. In another pod it is
// closed, and open where the pod asks for it: here both its ends are in the pod.
func TestTCP(t *testing.T) {
	results.Add(t)
	name := podName(t)
	old := apply(t, shared, name+"-old", counter{workload: "loop"})
	if got := ask(t, old, counterPort, "count"); got != "101 open" {
		t.Fatalf("it answers %q", got)
	}
	archive, err := shared.Checkpoint(t.Context(), old.Metadata.Name, "counter", 0)
	if err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(4000))
	}
	if got := ask(t, old, counterPort, "count"); got != "102 open" {
		t.Errorf("after the checkpoint it answers %q", got)
	}
	ref := publish(t, shared, archive, name+":1")
	secrets := map[string]any{"imagePullSecrets": []any{map[string]any{"name": pullSecret}}}
	closed := apply(t, shared, name+"-closed", counter{image: ref, annotations: restoring, pod: secrets})
	if got := ask(t, closed, counterPort, "count"); got != "102 closed" {
		t.Errorf("in another pod it answers %q", got)
	}
	open := apply(t, shared, name+"-open", counter{image: ref, pod: secrets, annotations: map[string]string{
		"dev.gpuckpt.restore": "true", "dev.gpuckpt.criu.tcp-established": "true",
	}})
	if got := ask(t, open, counterPort, "count"); got != "102 open" {
		t.Errorf("in a pod that asks for open connections it answers %q", got)
	}
}
