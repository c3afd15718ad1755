// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	ctdimages "github.com/containerd/containerd/v2/core/images"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
)

// deploy/agent in a cluster of two nodes whose kubelets ask the API server who may what: objects have
// GPU pods checkpointed without a right at kubelets, and pushed with a named secret; moved to the other
// node; checkpointed before an eviction or the suspension of a Job; and by a schedule. What the driver refuses is told
// by the objects, and the pods run on.
func TestObjects(t *testing.T) {
	results.Add(t)
	needs(t, "gpuckpt-agent")
	needs(t, "kubectl-gpuckpt")
	needs(t, "kube-controller-manager")
	places := t.TempDir() // what is at other places on each node
	trusts := func(name string) string {
		return fmt.Sprintf("[restore]\nkeys = [%q]\n", filepath.Join(places, name+".keys"))
	}
	n := own(t, node.Options{APIServer: true, Controllers: true, KubeletAsks: true, ShimConfig: trusts(node.Name)})
	other := own(t, node.Options{Join: n, KubeletAsks: true, ShimConfig: trusts(node.JoinedName)})
	k := objects{n, other, places}
	kubectl := func(args ...string) string { t.Helper(); return k.kubectl(t, args...) }
	go func() {
		if err := n.Schedule(t.Context()); err != nil {
			t.Errorf("the scheduler: %v", err)
		}
	}()
	k.take(t, n)
	k.take(t, other)
	kubectl("label", "node", other.Name(), "zone=b")
	givePullSecret(t, n)
	kubectl("create", "namespace", "gpuckpt")
	kubectl("annotate", "namespace", "default", "gpuckpt.dev/repositories="+n.Registry().Host+",registry.k8s.io/kube-proxy,r.test")
	kubectl("apply", "-k", filepath.Join(sourceDir(t), "deploy", "agent"))
	gpuckpt, err := bins.Path("gpuckpt")
	if err != nil {
		t.Fatal(err)
	}
	host, port, err := net.SplitHostPort(n.APIAddress())
	if err != nil {
		t.Fatal(err)
	}
	patch := func(object string, args []string, more ...any) {
		t.Helper()
		changes := []any{map[string]any{"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": args}}
		for name, value := range map[string]string{"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port} {
			changes = append(changes, map[string]any{"op": "add", "path": "/spec/template/spec/containers/0/env/-", "value": map[string]any{"name": name, "value": value}})
		}
		data, err := json.Marshal(append(changes, more...))
		if err != nil {
			t.Fatal(err)
		}
		kubectl("patch", "--namespace", "gpuckpt", object, "--type=json", "--patch", string(data))
	}
	patch("daemonset/gpuckpt-agent", []string{
		"--containerd=" + places + "/$(NODE_NAME).sock", "--env=GPUCKPT_CONFIG=" + places + "/$(NODE_NAME).toml",
		"--hooks=$(NODE_IP):9403", "--gpuckpt=" + gpuckpt, "--plain-http", "--keys=" + places + "/$(NODE_NAME).keys",
	}, // These nodes have the machine's root, which is shared where systemd runs; those of TestJourney have their own.
		map[string]any{"op": "remove", "path": "/spec/template/spec/containers/0/volumeMounts/0/mountPropagation"})
	// The API server is at an address of the host alone.
	patch("deployment/gpuckpt-controller", []string{"--controller", "--plain-http", "--keep-keys=5s", "--health=:8081"}, map[string]any{"op": "add", "path": "/spec/template/spec/hostNetwork", "value": true})
	kubectl("rollout", "status", "--namespace", "gpuckpt", "daemonset/gpuckpt-agent", "--timeout=180s")
	kubectl("rollout", "status", "--namespace", "gpuckpt", "deployment/gpuckpt-controller", "--timeout=180s")
	for _, c := range []struct {
		account string
		may     map[string]string
	}{
		{"agent", map[string]string{
			"create nodes --subresource=checkpoint": "no", "create nodes --subresource=proxy": "no", "get nodes --subresource=proxy": "no",
			"list secrets": "no", "get secrets": "no", "create pods": "no", "delete pods": "no", "create checkpoints.gpuckpt.dev": "no",
		}},
		{"controller", map[string]string{
			"create pods": "yes", "update checkpoints.gpuckpt.dev --subresource=status": "yes", "create nodes --subresource=checkpoint": "no", "get nodes --subresource=proxy": "no", "list secrets": "no", "create pods --subresource=exec": "no",
		}},
	} {
		for what, want := range c.may {
			out, err := n.Kubectl(t.Context(), append([]string{"auth", "can-i", "--as=system:serviceaccount:gpuckpt:gpuckpt-" + c.account}, strings.Fields(what)...)...)
			got := strings.TrimSpace(out)
			if err != nil { // kubectl's way to say no
				got = "no"
			}
			if got != want {
				t.Errorf("may the %s %s? %s, want %s: %v", c.account, what, got, want, err)
			}
		}
	}
	for _, at := range []*node.Node{n, other} {
		k.counts(t, at, n, true)
		k.counts(t, at, other, true)
	}
	t.Run("checkpoint", k.testCheckpoint)
	t.Run("trust", func(t *testing.T) { k.testTrust(t, trusts) })
	t.Run("names", k.testNames)
	t.Run("pair", k.testPair)
	t.Run("migration", k.testMigration)
	t.Run("schedule", k.testSchedule)
	t.Run("job", k.testJob)
	t.Run("eviction", k.testEviction)
}

// objects is a cluster of two nodes with the agents and the controller.
type objects struct {
	n, other *node.Node
	places   string
}

// take has an agent run on a node, when the DaemonSet is there.
func (k objects) take(t *testing.T, n *node.Node) {
	t.Helper()
	importAgent(t, n)
	for kind, path := range map[string]string{".sock": n.Address(), ".toml": n.ShimConfigPath()} {
		if err := os.Symlink(path, filepath.Join(k.places, n.Name()+kind)); err != nil {
			t.Fatal(err)
		}
	}
	k.kubectl(t, "label", "node", n.Name(), "nvidia.com/gpu.present=true")
}

// counts waits until the key of one node counts on another, or does no more.
func (k objects) counts(t *testing.T, at, of *node.Node, want bool) {
	t.Helper()
	within(t, fmt.Sprintf("does the key of %s count on %s? %t", of.Name(), at.Name(), want), func() bool {
		out, err := at.OutputEnv(t.Context(), []string{"GPUCKPT_CONFIG=" + at.ShimConfigPath()}, "gpuckpt", "key", "list")
		if err != nil {
			t.Fatal(err)
		}
		return strings.Contains(out, "/"+of.Name()+".pub\n") == want
	})
}

// The key of a node that joins later counts without a person's doing (TestJourney has it restore). The keys
// of a node that is gone count for a time, and no more then.
func (k objects) testTrust(t *testing.T, trusts func(name string) string) {
	const name = "gpuckpt-node-3"
	third := own(t, node.Options{Join: k.n, Name: name, KubeletAsks: true, ShimConfig: trusts(name)})
	k.take(t, third)
	began := time.Now()
	k.counts(t, third, k.n, true)
	t.Logf("the key of the first node counts on the third %s after its label", time.Since(began).Round(time.Second))
	k.counts(t, k.n, third, true)
	if known := k.kubectl(t, "get", "nodekeys", "--output", "name"); len(strings.Fields(known)) != 3 {
		t.Errorf("known are the keys of %q", known)
	}
	if err := third.Stop(); err != nil {
		t.Error(err)
	}
	k.kubectl(t, "delete", "node", name)
	k.counts(t, k.n, third, false)
	k.counts(t, k.n, k.other, true)
}

// kubectl runs kubectl, and ends the test on an error with what the cluster says of it.
func (k objects) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := k.n.Kubectl(t.Context(), args...)
	if err == nil {
		return out
	}
	said := fmt.Sprint(err)
	for _, args := range []string{
		"logs --namespace gpuckpt --selector app.kubernetes.io/name=gpuckpt-agent --tail=20 --prefix", "logs --namespace gpuckpt deployment/gpuckpt-controller --tail=20",
		"get pods,migrations,checkpointschedules --all-namespaces", "get events", "get checkpoints --output jsonpath={.items[*].status}",
	} {
		out, err := k.n.Kubectl(session.Context(), strings.Fields(args)...)
		said += fmt.Sprintf("\n%s: %v\n%s", args, err, out)
	}
	t.Fatalf("%s\n%s\n%s", said, k.n.LogTail(2000), k.other.LogTail(2000))
	return ""
}

// make makes an object of a spec.
func (k objects) make(t *testing.T, kind, name, spec string) {
	t.Helper()
	if err := k.n.Apply(t.Context(), fmt.Sprintf("{apiVersion: gpuckpt.dev/v1alpha1, kind: %s, metadata: {name: %s}, spec: {repository: %s/job, pushSecret: %s, %s}}",
		kind, name, k.n.Registry().Host, pullSecret, spec)); err != nil {
		t.Fatal(err)
	}
}

// plugin runs kubectl's plugin, as kubectl's user does, and returns what it prints.
func (k objects) plugin(t *testing.T, args ...string) string {
	t.Helper()
	cmd, err := k.n.Command(t.Context(), "kubectl", append([]string{"gpuckpt"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	cmd.Env, cmd.Stderr = append(cmd.Env, k.n.KubectlEnv()...), &said
	out, err := cmd.Output()
	t.Logf("kubectl gpuckpt %s: %s%s", strings.Join(args, " "), said.String(), out)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// within waits until something is so, for minutes: a checkpoint on a machine that does much else takes
// half of one. Most look by kubectl, which takes a tenth of a second of a processor.
func within(t *testing.T, what string, so func() bool) {
	t.Helper()
	for deadline := time.Now().Add(3 * time.Minute); !so(); time.Sleep(300 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within three minutes", what)
		}
	}
}

// event waits for an event of an object.
func (k objects) event(t *testing.T, kind, name, reason string) {
	t.Helper()
	within(t, "the event is there", func() bool {
		out, err := k.n.Kubectl(t.Context(), "get", "events", "--field-selector", "involvedObject.kind="+kind+",involvedObject.name="+name+",reason="+reason, "--output", "name")
		return err == nil && out != ""
	})
}

func (k objects) testCheckpoint(t *testing.T) {
	n := k.n
	kubectl := func(args ...string) string { t.Helper(); return k.kubectl(t, args...) }
	object := func(name, pod string) {
		t.Helper()
		k.make(t, "Checkpoint", name, "pod: "+pod)
	}
	first := apply(t, n, "first", counter{})
	expect(t, first, counterPort, "101")
	if code := hookCode(t, n.IP()); code != http.StatusOK {
		t.Errorf("the agent answers %d to root of its node", code)
	}
	k.plugin(t, "checkpoint", "first", "--name", "first", "--to", n.Registry().Host+"/job", "--push-secret", pullSecret, "--wait")
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
	if said := k.plugin(t, "logs", "first"); !strings.Contains(said, "Complete (Pushed)") || !strings.Contains(said, "Pod first") {
		t.Errorf("kubectl gpuckpt logs prints\n%s", said)
	}
	k.removed(t, made.Status.Containers[0].Digest)
	if left, err := filepath.Glob("/run/gpuckpt-agent-*"); err != nil || len(left) > 0 {
		t.Errorf("left are %v, %v", left, err)
	}
	removed(t, n, "printed")
	if err := n.Apply(t.Context(), k.plugin(t, "restore", "first", "--name", "printed")); err != nil {
		t.Fatal(err)
	}
	printed, err := n.WaitReady(t.Context(), "printed")
	if err != nil {
		t.Fatal(err)
	}
	expect(t, printed, counterPort, "102")
	// Nor is there of an image that is removed by hand, though CRI has given it a second name.
	where := []string{"--address", n.Address(), "--namespace", node.Namespace, "--json"}
	out, err := n.Output(t.Context(), "gpuckpt", append([]string{"checkpoint", "--pod", "default/first", "counter", "--image", "gpuckpt.test/removed:1", "--leave-running", "--image-path", filepath.Join(n.Dir(), "dumps")}, where...)...)
	var byHand struct{ Containers []struct{ Digest string } }
	if err := errors.Join(err, json.Unmarshal([]byte(out), &byHand)); err != nil || len(byHand.Containers) != 1 {
		t.Fatalf("%v, %s", err, out)
	}
	within(t, "CRI has its own name for the image", func() bool { return len(k.ours(t, byHand.Containers[0].Digest)) == 2 })
	if _, err := n.Output(t.Context(), "gpuckpt", append([]string{"rm", "gpuckpt.test/removed:1"}, where...)...); err != nil {
		t.Fatal(err)
	}
	if left := k.ours(t, byHand.Containers[0].Digest); len(left) > 0 {
		t.Errorf("left are %q", left)
	}
	// What is done on the node itself is told of the pod, too.
	_, id, _ := strings.Cut(first.Status.ContainerStatuses[0].ContainerID, "://")
	for _, command := range []string{"suspend", "resume"} {
		if _, err := n.Output(t.Context(), "gpuckpt", command, "--address", n.Address(), "--namespace", node.Namespace, id); err != nil {
			t.Fatal(err)
		}
	}
	k.event(t, "Pod", "first", "Suspended")
	k.event(t, "Pod", "first", "Resumed")
	scaleOut(t, k)

	// The name is a tag: one that is too long for a registry is refused at once.
	if err := n.Apply(t.Context(), fmt.Sprintf("{apiVersion: gpuckpt.dev/v1alpha1, kind: Checkpoint, metadata: {name: %s}, spec: {repository: r.test/job, pod: first}}", strings.Repeat("n", 64))); err == nil || !strings.Contains(err.Error(), "metadata.name") {
		t.Errorf("a name of 64 letters: %v", err)
	}
	if err := n.Apply(t.Context(), "{apiVersion: gpuckpt.dev/v1alpha1, kind: Checkpoint, metadata: {name: tagged}, spec: {repository: 'r.test/job:1', pod: first}}"); err == nil || !strings.Contains(err.Error(), "without a tag") {
		t.Errorf("a repository with a tag: %v", err)
	}

	refused := apply(t, n, "refused", counter{workload: "managed"})
	expect(t, refused, counterPort, "101")
	object("refused", "refused")
	kubectl("wait", "--for=condition=Failed", "checkpoint/refused", "--timeout=180s")
	if why := kubectl("get", "checkpoint", "refused", "--output", "jsonpath={.status.conditions[0].reason}: {.status.conditions[0].message}"); !strings.Contains(why, "CheckpointFailed") || !strings.Contains(why, "not supported") {
		t.Errorf("it says %s", why)
	}
	k.event(t, "Checkpoint", "refused", "CheckpointFailed")
	k.event(t, "Pod", "refused", "CheckpointFailed")
	expect(t, refused, counterPort, "102")

	// A Migration leaves it where it is, too. Driver 580 gives its reason once only.
	k.make(t, "Migration", "refused-elsewhere", "pod: refused")
	kubectl("wait", "--for=condition=Failed", "migration/refused-elsewhere", "--timeout=180s")
	if why := kubectl("get", "migration", "refused-elsewhere", "--output", "jsonpath={.status.conditions[0].reason}: {.status.conditions[0].message}"); !strings.Contains(why, "CheckpointFailed") ||
		!slices.ContainsFunc([]string{"not supported", "has refused this process before"}, func(words string) bool { return strings.Contains(why, words) }) {
		t.Errorf("it says %s", why)
	}
	kubectl("wait", "--for=delete", "pod/refused-elsewhere", "--timeout=180s")
	expect(t, refused, counterPort, "103")
}

// hookCode returns what the agent at an address answers to a hook of a namespace without pods.
func hookCode(t *testing.T, address string) int {
	t.Helper()
	answer, err := http.Get("http://" + net.JoinHostPort(address, "9403") + "/checkpoint/none")
	if err != nil {
		t.Fatal(err)
	}
	_ = answer.Body.Close()
	return answer.StatusCode
}

// ours returns the images of Checkpoints that the first node has, and those with these digests.
func (k objects) ours(t *testing.T, digests ...string) (names []string) {
	t.Helper()
	list, err := k.n.Client().ImageService().List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range list {
		if strings.HasPrefix(i.Name, "gpuckpt.invalid/") || slices.Contains(digests, i.Target.Digest.String()) {
			names = append(names, i.Name)
		}
	}
	return names
}

// removed waits until the node has none of the images of Checkpoints, nor one of the digests.
func (k objects) removed(t *testing.T, digests ...string) {
	t.Helper()
	var left []string
	defer func() {
		if len(left) > 0 {
			log, err := k.n.Kubectl(session.Context(), "logs", "--namespace", "gpuckpt", "--selector", "app.kubernetes.io/name=gpuckpt-agent", "--tail=200", "--prefix")
			t.Logf("left are %q; the agents say (%v)\n%s", left, err, log)
		}
	}()
	within(t, "the node's image is removed", func() bool {
		left = k.ours(t, digests...)
		return len(left) == 0
	})
}

// Who may make Checkpoints, or pods, may name any image as the one to push to. The node's image of that
// name stays what it is, for containerd and for CRI, which the kubelet asks. What a label says changes
// nothing, and what is kept of a pod that ends has a name that no pod can have.
func (k objects) testNames(t *testing.T) {
	const repository, tag = "registry.k8s.io/kube-proxy", "v1.36.0"
	victim := repository + ":" + tag
	workload, err := k.n.Client().ImageService().Get(t.Context(), harness.WorkloadImage)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.n.Client().ImageService().Create(t.Context(), ctdimages.Image{Name: victim, Target: workload.Target}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := k.n.RemoveImage(session.Context(), victim); err != nil {
			t.Error(err)
		}
	})
	status := func(name string) (string, error) { // by CRI
		return k.n.Crictl(t.Context(), "inspecti", "--output", "go-template", "--template", "{{.status.id}}", name)
	}
	var before string
	within(t, "CRI has the image", func() bool {
		before, err = status(victim)
		return err == nil
	})
	same := func() {
		t.Helper()
		found, err := k.n.Client().ImageService().Get(t.Context(), victim)
		if err != nil || found.Target.Digest != workload.Target.Digest {
			t.Errorf("the image is %s, %v; it was %s", found.Target.Digest, err, workload.Target.Digest)
		}
		if now, err := status(victim); err != nil || now != before {
			t.Errorf("for CRI the image is %s, %v; it was %s", now, err, before)
		}
	}
	failed := func(name string) string {
		t.Helper()
		k.kubectl(t, "wait", "--for=condition=Failed", "checkpoint/"+name, "--timeout=180s")
		why := k.kubectl(t, "get", "checkpoint", name, "--output", "jsonpath={.status.conditions[0].reason}: {.status.conditions[0].message}")
		if !strings.HasPrefix(why, "PushFailed: ") {
			t.Errorf("it says %s", why)
		}
		return why
	}
	c := k.ending("checkpoint", 300)
	c.annotations = map[string]string{"gpuckpt.dev/on-deletion": "checkpoint", "gpuckpt.dev/repository": repository, "gpuckpt.dev/tag": tag}
	thief := apply(t, k.n, "thief", c)
	expect(t, thief, counterPort, "101")
	if err := k.n.Apply(t.Context(), fmt.Sprintf(`{apiVersion: gpuckpt.dev/v1alpha1, kind: Checkpoint, metadata: {name: thief, labels: {gpuckpt.dev/evicted: %q}}, spec: {repository: %s, tag: %s, pod: thief}}`,
		thief.Metadata.UID, repository, tag)); err != nil {
		t.Fatal(err)
	}
	if why := failed("thief"); strings.Contains(why, "stays on the node") {
		t.Errorf("it says %s", why)
	}
	same()
	k.removed(t)
	expect(t, thief, counterPort, "102")

	// The pod ends: its image stays, and can be sent by hand as the object says.
	k.kubectl(t, "delete", "pod", "thief", "--timeout=180s")
	why := failed("thief-" + thief.Metadata.UID[:8])
	same()
	kept := k.ours(t)
	if len(kept) != 1 || !strings.Contains(why, "gpuckpt image push --namespace k8s.io "+kept[0]+" "+victim) {
		t.Fatalf("kept are %q, and it says %s", kept, why)
	}
	if id, err := status(kept[0]); err == nil {
		t.Errorf("a pod could name the image: CRI has %s", id)
	}
	credentials, err := k.n.Registry().Credentials()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "config.json"), credentials, 0o600); err != nil {
		t.Fatal(err)
	}
	where := []string{"--address", k.n.Address(), "--namespace", node.Namespace}
	saved := k.n.Registry().Host + "/saved:1"
	if _, err := k.n.OutputEnv(t.Context(), []string{"DOCKER_CONFIG=" + dir}, "gpuckpt", append([]string{"image", "push", "--plain-http", kept[0], saved}, where...)...); err != nil {
		t.Fatal(err)
	}
	if _, err := k.n.Output(t.Context(), "gpuckpt", append([]string{"rm", kept[0]}, where...)...); err != nil {
		t.Fatal(err)
	}
	expect(t, apply(t, k.n, "thief-again", counter{image: saved, annotations: restoring, pod: map[string]any{"imagePullSecrets": []any{map[string]any{"name": pullSecret}}}}), counterPort, "103")
}

// A pod of two programs that share a count is checkpointed in one cut.
func (k objects) testPair(t *testing.T) {
	n := k.n
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
	k.make(t, "Checkpoint", "pair", "pod: pair")
	k.kubectl(t, "wait", "--for=condition=Complete", "checkpoint/pair", "--timeout=180s")
	k.event(t, "Pod", "pair", "Checkpointed")
	countOn(t, pair, 2)
	images := strings.Fields(k.kubectl(t, "get", "checkpoint", "pair", "--output", "jsonpath={.status.containers[*].image}"))
	if len(images) != 2 || !strings.HasSuffix(images[0], ":pair-place0") || !strings.HasSuffix(images[1], ":pair-place1") {
		t.Fatalf("made were %q", images)
	}
	// One of them alone has its name in the tag, too.
	k.make(t, "Checkpoint", "one", "pod: pair, container: place1")
	k.kubectl(t, "wait", "--for=condition=Complete", "checkpoint/one", "--timeout=180s")
	if image := k.kubectl(t, "get", "checkpoint", "one", "--output", "jsonpath={.status.containers[*].name} {.status.containers[*].image}"); image != "place1 "+k.n.Registry().Host+"/job:one-place1" {
		t.Errorf("made was %s", image)
	}
	countOn(t, pair, 2)
	k.kubectl(t, "delete", "pod", "pair")
	countOn(t, inTurns("pair-again", restoring, images...), 2)
}

// countOn waits until each container of a pod has seen ten turns more of programs that count in turns
// in /dev/shm. It fails the test if one finds that the count is not that of its GPU.
func countOn(t *testing.T, pod node.Pod, containers int) {
	t.Helper()
	for i := range containers {
		first := -1
		within(t, "the programs count on", func() bool {
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

// scaleOut runs deploy/deployment.yaml: its first pod is checkpointed, and another one continues from there.
func scaleOut(t *testing.T, k objects) {
	t.Helper()
	pushWorkload(t, k.n, "gpuwork:latest")
	file := read(t, filepath.Join(sourceDir(t), "deploy", "deployment.yaml"))
	if err := k.n.Apply(t.Context(), strings.ReplaceAll(file, "REGISTRY", k.n.Registry().Host)); err != nil {
		t.Fatal(err)
	}
	k.kubectl(t, "rollout", "status", "deployment/counter", "--timeout=180s")
	first := k.kubectl(t, "get", "pods", "--selector", "app=counter", "--output", "jsonpath={.items[*].metadata.name}")
	within(t, "there is a Checkpoint", func() bool {
		return k.kubectl(t, "get", "checkpoints", "--selector", "gpuckpt.dev/template=counter", "--output", "name") != ""
	})
	k.kubectl(t, "wait", "--for=condition=Complete", "checkpoint", "--selector", "gpuckpt.dev/template=counter", "--timeout=180s")
	k.kubectl(t, "scale", "deployment/counter", "--replicas=2")
	k.kubectl(t, "rollout", "status", "deployment/counter", "--timeout=180s")
	pods := strings.Fields(k.kubectl(t, "get", "pods", "--selector", "app=counter", "--output", "jsonpath={.items[*].metadata.name}"))
	if len(pods) != 2 {
		t.Fatalf("there are %q", pods)
	}
	for _, name := range pods {
		reason := "Restored"
		if name == first {
			reason = "StartsCold"
		}
		k.event(t, "Pod", name, reason)
		pod, err := k.n.Pod(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		expect(t, pod, counterPort, "101")
	}
	k.kubectl(t, "delete", "checkpoint", "--selector", "gpuckpt.dev/template=counter", "--timeout=60s")
	within(t, "a Checkpoint that is deleted is made again", func() bool {
		return k.kubectl(t, "get", "checkpoints", "--selector", "gpuckpt.dev/template=counter", "--output", "name") != ""
	})
	k.kubectl(t, "delete", "deployment", "counter", "--cascade=foreground", "--timeout=180s")
	within(t, "the Checkpoint goes with its owner", func() bool {
		return k.kubectl(t, "get", "checkpoints", "--selector", "gpuckpt.dev/template=counter", "--output", "name") == ""
	})
}

// A Migration has a pod go on, on a node that has a label.
func (k objects) testMigration(t *testing.T) {
	pod := apply(t, k.n, "traveller", counter{})
	expect(t, pod, counterPort, "101")
	k.make(t, "Migration", "arrived", "pod: traveller, deleteFirst: true, nodeSelector: {zone: b}")
	removed(t, k.n, "arrived")
	k.kubectl(t, "wait", "--for=condition=Complete", "migration/arrived", "--timeout=180s")
	moved, err := k.other.WaitReady(t.Context(), "arrived")
	if err != nil {
		t.Fatal(err)
	}
	expect(t, moved, counterPort, "102")
	k.event(t, "Pod", "arrived", "Restored")
	if path := k.kubectl(t, "get", "migration", "arrived", "--output", "jsonpath={.status.from} {.status.to}"); path != node.Name+" "+node.JoinedName {
		t.Errorf("it went %s", path)
	}
	if left := k.kubectl(t, "get", "pod", "traveller", "--ignore-not-found"); left != "" {
		t.Errorf("there is still %s", left)
	}
}

// A schedule keeps the newest Checkpoint of a pod, and deletes the images of the others.
func (k objects) testSchedule(t *testing.T) {
	pod := apply(t, k.n, "scheduled", counter{meta: map[string]any{"labels": map[string]string{"app": "scheduled"}}})
	if err := k.n.Apply(t.Context(), fmt.Sprintf("{apiVersion: gpuckpt.dev/v1alpha1, kind: CheckpointSchedule, metadata: {name: often}, spec: {schedule: '@every 1s', keep: 1, selector: {matchLabels: {app: scheduled}}, checkpoint: {repository: %s/often, pushSecret: %s}}}",
		k.n.Registry().Host, pullSecret)); err != nil {
		t.Fatal(err)
	}
	done := func() []string { // NAME=DIGEST of those that have succeeded
		return strings.Fields(k.kubectl(t, "get", "checkpoints", "--selector", "gpuckpt.dev/schedule=often", "--output",
			`jsonpath={range .items[?(@.status.phase=="Succeeded")]}{.metadata.name}={.status.containers[0].digest} {end}`))
	}
	var first string
	within(t, "the schedule has made one", func() bool {
		if all := done(); len(all) > 0 {
			first = all[0]
		}
		return first != ""
	})
	name, digest, _ := strings.Cut(first, "=")
	k.kubectl(t, "wait", "--for=delete", "checkpoint/"+name, "--timeout=180s")
	k.kubectl(t, "patch", "checkpointschedule", "often", "--type=merge", "--patch", `{"spec":{"suspend":true}}`)
	if code := k.manifest(t, "often", digest); code != http.StatusNotFound {
		t.Errorf("the registry answers %d for the image of a Checkpoint that is gone", code)
	}
	within(t, "one is left", func() bool {
		return len(strings.Fields(k.kubectl(t, "get", "checkpoints", "--selector", "gpuckpt.dev/schedule=often", "--output", "name"))) == 1
	})
	within(t, "it has succeeded", func() bool { return len(done()) == 1 })
	if _, digest, _ := strings.Cut(done()[0], "="); k.manifest(t, "often", digest) != http.StatusOK {
		t.Error("the registry does not have the image of the Checkpoint that is kept")
	}
	expect(t, pod, counterPort, "101")
}

// manifest returns the registry's status for a manifest.
func (k objects) manifest(t *testing.T, repository, digest string) int {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodHead, "http://"+k.n.Registry().Host+"/v2/"+repository+"/manifests/"+digest, nil)
	if err != nil {
		t.Fatal(err)
	}
	request.SetBasicAuth(k.n.Registry().Login())
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	_ = answer.Body.Close()
	return answer.StatusCode
}

// A Job of deploy/job-preempted.yaml that is suspended, as Kueue does to preempt it, is checkpointed,
// and goes on when it is resumed. Until the first checkpoint the tag is the program's own image.
func (k objects) testJob(t *testing.T) {
	pushWorkload(t, k.n, "trainer:current")
	file := read(t, filepath.Join(sourceDir(t), "deploy", "job-preempted.yaml"))
	if err := k.n.Apply(t.Context(), strings.NewReplacer("REGISTRY", k.n.Registry().Host, "host: localhost", "host: "+k.n.IP()).Replace(file)); err != nil {
		t.Fatal(err)
	}
	defer k.kubectl(t, "delete", "job", "trainer", "--cascade=foreground", "--timeout=180s")
	// By the lines of docs/objects.md.
	suspend := func(yes bool) {
		t.Helper()
		k.kubectl(t, "patch", "job", "trainer", "--type=merge", "--patch", fmt.Sprintf(`{"spec":{"suspend":%t}}`, yes))
	}
	current := func() node.Pod {
		t.Helper()
		var names []string
		within(t, "the Job has a pod", func() bool {
			names = strings.Fields(k.kubectl(t, "get", "pods", "--selector", "batch.kubernetes.io/job-name=trainer", "--output", "jsonpath={.items[*].metadata.name}"))
			return len(names) == 1
		})
		pod, err := k.n.WaitReady(t.Context(), names[0])
		if err != nil {
			t.Fatalf("%v\n%s", err, k.kubectl(t, "describe", "pod", names[0]))
		}
		return pod
	}
	first := current()
	expect(t, first, counterPort, "101")
	suspend(true)
	k.kubectl(t, "wait", "--for=delete", "pod/"+first.Metadata.Name, "--timeout=180s")
	k.kubectl(t, "wait", "--for=condition=Suspended", "job/trainer", "--timeout=180s")
	if phase := k.kubectl(t, "get", "checkpoints", "--selector", "gpuckpt.dev/evicted="+first.Metadata.UID, "--output", "jsonpath={.items[*].status.phase}"); phase != "Succeeded" {
		t.Fatalf("the Checkpoints are %q", phase)
	}
	suspend(false)
	second := current()
	expect(t, second, counterPort, "102")
	suspend(true) // and once more, from what was restored
	k.kubectl(t, "wait", "--for=delete", "pod/"+second.Metadata.Name, "--timeout=180s")
	suspend(false)
	expect(t, current(), counterPort, "103")
	if over := k.kubectl(t, "get", "job", "trainer", "--output", "jsonpath={.status.succeeded}{.status.completionTime}"); over != "" {
		t.Errorf("the Job is over: %s", over)
	}
}

// ending is a pod that is checkpointed before it is evicted.
func (k objects) ending(what string, grace int) counter {
	return counter{
		annotations: map[string]string{"gpuckpt.dev/on-eviction": what, "gpuckpt.dev/repository": k.n.Registry().Host + "/evicted", "gpuckpt.dev/push-secret": pullSecret},
		pod:         map[string]any{"terminationGracePeriodSeconds": grace},
		container:   map[string]any{"env": []any{map[string]any{"name": "GPUWORK_ENDS", "value": "1"}}, "lifecycle": map[string]any{"preStop": map[string]any{"httpGet": map[string]any{"host": k.n.IP(), "port": 9403, "path": "/checkpoint/default"}}}},
	}
}

// A pod whose node is drained is checkpointed within its grace period, and goes on elsewhere. A pod
// that cannot make it says so.
func (k objects) testEviction(t *testing.T) {
	c := k.ending("migrate", 600)
	c.meta = map[string]any{"labels": map[string]string{"app": "evicted"}}
	pod := apply(t, k.n, "evicted", c)
	expect(t, pod, counterPort, "101")
	k.kubectl(t, "drain", k.n.Name(), "--pod-selector=app=evicted", "--force", "--timeout=300s")
	t.Cleanup(func() {
		if _, err := k.n.Kubectl(session.Context(), "uncordon", k.n.Name()); err != nil {
			t.Error(err)
		}
	})
	name := "evicted-" + pod.Metadata.UID[:8]
	removed(t, k.n, name)
	k.kubectl(t, "wait", "--for=condition=Complete", "migration/"+name, "--timeout=180s")
	moved, err := k.other.WaitReady(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	expect(t, moved, counterPort, "102")
	k.event(t, "Pod", "evicted", "CheckpointBegins")

	// One that may not be checkpointed does not wait for its grace period.
	c = k.ending("migrate", 600)
	c.annotations["gpuckpt.dev/repository"], c.meta = "elsewhere.test/evicted", map[string]any{"labels": map[string]string{"app": "unwelcome"}}
	apply(t, k.n, "unwelcome", c)
	k.kubectl(t, "drain", k.n.Name(), "--pod-selector=app=unwelcome", "--force", "--timeout=300s")
	k.event(t, "Pod", "unwelcome", "CheckpointRefused")

	if gpu.Kind != harness.SoftwareGPU {
		return // no other is slow when told to
	}
	// The finalizer keeps the object of the pod for as long as this takes.
	c = k.ending("checkpoint", 5)
	c.meta = map[string]any{"finalizers": []string{"gpuckpt.dev/test"}}
	late := apply(t, k.n, "late", c)
	t.Cleanup(func() {
		if _, err := k.n.Kubectl(session.Context(), "patch", "pod", "late", "--type=merge", "--patch", `{"metadata":{"finalizers":null}}`); err != nil {
			t.Error(err)
		}
	})
	softwareGPU(t, k.n, "checkpoint_delay_ms=60000\n")
	eviction := filepath.Join(t.TempDir(), "eviction.json")
	if err := os.WriteFile(eviction, []byte(`{"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "late"}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	k.kubectl(t, "create", "--raw", "/api/v1/namespaces/default/pods/late/eviction", "-f", eviction)
	name = "late-" + late.Metadata.UID[:8]
	within(t, "the Checkpoint is made", func() bool {
		_, err := k.n.Kubectl(t.Context(), "get", "checkpoint", name)
		return err == nil
	})
	k.kubectl(t, "wait", "--for=condition=Failed", "checkpoint/"+name, "--timeout=180s")
	t.Log(k.kubectl(t, "get", "checkpoint", name, "--output", "jsonpath={.status.conditions[0].reason}: {.status.conditions[0].message}"))
	within(t, "the pod says so", func() bool {
		out, err := k.n.Kubectl(t.Context(), "get", "events", "--field-selector", "involvedObject.kind=Pod,involvedObject.name=late,type=Warning", "--output", "jsonpath={.items[*].message}")
		return err == nil && strings.Contains(out, "before its end")
	})
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
