// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// A Deployment whose template has the gate: the first replica starts cold and is checkpointed as soon as its
// namespace may push. Later ones continue from there on whatever node, but one on a node with another driver
// starts cold and says why. A new template starts cold again.
func (j *journey) testReplicas(t *testing.T) {
	registry := j.nodes[0].Registry().Host
	server := j.server("replicas", registry+"/server:1", "", map[string]string{"gpuckpt.dev/repository": registry + "/replicas", "gpuckpt.dev/push-secret": pullSecret})
	template, _ := server["spec"].(map[string]any)["template"].(map[string]any)
	spec, _ := template["spec"].(map[string]any)
	delete(spec, "nodeSelector")
	spec["schedulingGates"] = []any{map[string]string{"name": "gpuckpt.dev/checkpoint"}}
	j.only(t, 0)
	defer j.only(t, 0, 1, 2)
	j.apply(t, server)
	first := j.replica(t, 0, nil)
	first.says(t, "StartsCold", "no checkpoint of its template yet")
	first.says(t, "CheckpointRefused", "may not push to "+registry+"/replicas")
	first.counts(t, "101") // which the checkpoint has then

	const kept = "gpuckpt.dev/template=replicas"
	j.kubectl(t, "annotate", "--overwrite", "namespace", "default", "gpuckpt.dev/repositories="+registry+"/team,"+registry+"/replicas")
	tried := 0
	within(t, "the Checkpoint is made", func() bool { // the API server does not know at once what a namespace may
		tried++
		j.kubectl(t, "annotate", "--overwrite", "pod", first.name, fmt.Sprintf("tried=%d", tried))
		return j.kubectl(t, "get", "checkpoints", "--selector", kept, "--output", "name") != ""
	})
	j.kubectl(t, "wait", "--for=condition=Complete", "checkpoint", "--selector", kept, "--timeout=180s")
	first.counts(t, "102") // it runs on

	known := []string{first.name}
	for i, on := range []int{1, 0} {
		j.only(t, on)
		j.kubectl(t, "scale", "deployment/replicas", fmt.Sprintf("--replicas=%d", i+2))
		next := j.replica(t, on, known)
		known = append(known, next.name)
		next.says(t, "Continues", "from the Checkpoint replicas-")
		next.says(t, "Restored", "server")
		next.counts(t, "102")
		next.noted(t, true)
	}

	j.only(t, 2) // whose driver is another
	j.kubectl(t, "scale", "deployment/replicas", "--replicas=4")
	cold := j.replica(t, 2, known)
	cold.says(t, "Continues", "from the Checkpoint replicas-")
	cold.says(t, "StartedAfresh", "999.1")
	cold.counts(t, "101")
	cold.noted(t, false)
	if all := strings.Fields(j.kubectl(t, "get", "checkpoints", "--selector", kept, "--output", "name")); len(all) != 1 {
		t.Errorf("of one template there are %q", all)
	}

	j.only(t, 0)
	j.kubectl(t, "scale", "deployment/replicas", "--replicas=1")
	within(t, "one is left", func() bool { return len(j.replicas(t)) == 1 })
	known = append(known, j.replicas(t)...)
	j.kubectl(t, "rollout", "restart", "deployment/replicas")
	again := j.replica(t, 0, known)
	again.says(t, "StartsCold", "no checkpoint of its template yet")
	again.noted(t, false)
	within(t, "the new template has a Checkpoint of its own", func() bool {
		return len(strings.Fields(j.kubectl(t, "get", "checkpoints", "--selector", kept, "--output", "name"))) == 2
	})
	j.kubectl(t, "wait", "--for=condition=Complete", "checkpoint", "--selector", kept, "--timeout=180s")

	// An image that the registry has lost keeps no replica from starting.
	image := j.kubectl(t, "get", "checkpoints", "--selector", kept, "--sort-by=.metadata.creationTimestamp", "--output", "jsonpath={.items[-1:].spec.repository}@{.items[-1:].status.containers[0].digest}")
	ref, err := name.NewDigest(image, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	user, password := j.nodes[0].Registry().Login()
	if err := remote.Delete(ref, remote.WithTransport(j.nodes[0].Registry().Transport()), remote.WithAuth(&authn.Basic{Username: user, Password: password}), remote.WithContext(t.Context())); err != nil {
		t.Fatal(err)
	}
	known = append(known, again.name)
	j.only(t, 1)
	j.kubectl(t, "scale", "deployment/replicas", "--replicas=2")
	lost := j.replica(t, 1, known)
	lost.says(t, "StartsCold", "its checkpoint does not start: container server: ")
	lost.counts(t, "101")
	lost.noted(t, false)
	j.kubectl(t, "delete", "deployment", "replicas", "--cascade=foreground", "--timeout=180s")
	within(t, "the Checkpoints go with their owners", func() bool {
		return j.kubectl(t, "get", "checkpoints", "--selector", kept, "--output", "name") == ""
	})
}

// only has new pods go to some of the nodes alone.
func (j *journey) only(t *testing.T, to ...int) {
	t.Helper()
	for i, n := range j.nodes {
		verb := "cordon"
		if slices.Contains(to, i) {
			verb = "uncordon"
		}
		j.kubectl(t, verb, n.Name())
	}
}

// replicas returns the pods of testReplicas.
func (j *journey) replicas(t *testing.T) []string {
	t.Helper()
	return strings.Fields(j.kubectl(t, "get", "pods", "--selector", "app=replicas", "--output", "jsonpath={.items[*].metadata.name}"))
}

// one is a replica of testReplicas that is ready.
type one struct {
	j    *journey
	on   int
	name string
}

// replica waits until there is one more than those that are known, ready, on a node.
func (j *journey) replica(t *testing.T, on int, known []string) *one {
	t.Helper()
	r := &one{j: j, on: on}
	within(t, "there is another replica", func() bool {
		for _, name := range j.replicas(t) {
			if !slices.Contains(known, name) {
				r.name = name
			}
		}
		return r.name != ""
	})
	j.kubectl(t, "wait", "--for=condition=Ready", "pod/"+r.name, "--timeout=120s")
	if at := r.get(t, "{.spec.nodeName}"); at != j.nodes[on].Name() {
		t.Errorf("%s is on %s", r.name, at)
	}
	return r
}

func (r *one) get(t *testing.T, path string) string {
	t.Helper()
	return r.j.kubectl(t, "get", "pod", r.name, "--output", "jsonpath="+path)
}

// says waits for an event of the replica.
func (r *one) says(t *testing.T, reason, why string) {
	t.Helper()
	var said string
	within(t, r.name+" has an event "+reason, func() bool {
		said = r.j.kubectl(t, "get", "events", "--field-selector", "involvedObject.kind=Pod,involvedObject.name="+r.name+",reason="+reason, "--output", "jsonpath={.items[*].message}")
		return said != ""
	})
	if !strings.Contains(said, why) {
		t.Errorf("the event %s is %q, want %q", reason, said, why)
	}
}

// counts asks the replica to count.
func (r *one) counts(t *testing.T, want string) {
	t.Helper()
	if answer := get(t, "http://"+net.JoinHostPort(r.get(t, "{.status.podIP}"), strconv.Itoa(counterPort))+"/count"); answer != want {
		t.Fatalf("the replica %s answers %s, want %s", r.name, answer, want)
	}
}

// noted reports an error unless the replica finds that it was restored, or does not.
func (r *one) noted(t *testing.T, want bool) {
	t.Helper()
	pid, err := r.j.nodes[r.on].Pid(t.Context(), strings.TrimPrefix(r.get(t, "{.status.containerStatuses[0].containerID}"), "containerd://"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/%d/root/run/gpuckpt/restored", pid)); want != (err == nil) {
		t.Errorf("%s has /run/gpuckpt/restored? %v", r.name, err)
	}
}
