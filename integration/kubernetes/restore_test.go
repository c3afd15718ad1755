// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
)

// surroundings are what a pod has that another has not: a secret, a configMap, an
// account of its own, and an emptyDir.
func surroundings(t *testing.T, name string) map[string]any {
	t.Helper()
	for _, args := range [][]string{
		{"create", "secret", "generic", name, "--from-literal=key=secret of " + name},
		{"create", "configmap", name, "--from-literal=key=config of " + name},
		{"create", "serviceaccount", name},
	} {
		if _, err := shared(t).Kubectl(t.Context(), args...); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			kind := args[1]
			if _, err := shared(t).Kubectl(context.Background(), "delete", kind, name); err != nil {
				t.Error(err)
			}
		})
	}
	return map[string]any{
		"serviceAccountName": name,
		"imagePullSecrets":   []any{map[string]any{"name": pullSecret}},
		"volumes": []any{
			map[string]any{"name": "secret", "secret": map[string]any{"secretName": name}},
			map[string]any{"name": "config", "configMap": map[string]any{"name": name}},
			map[string]any{"name": "cache", "emptyDir": map[string]any{}},
		},
	}
}

// mounts are where a container has them.
var mounts = map[string]any{"volumeMounts": []any{
	map[string]any{"name": "secret", "mountPath": "/etc/secret"},
	map[string]any{"name": "config", "mountPath": "/etc/config"},
	map[string]any{"name": "cache", "mountPath": "/cache"},
}}

// probed is mounts with probes, which run a program in the container.
var probed = map[string]any{
	"volumeMounts":   mounts["volumeMounts"],
	"readinessProbe": map[string]any{"periodSeconds": 1, "exec": map[string]any{"command": []string{"/usr/bin/gpuwork", "exit", "0"}}},
	"livenessProbe":  map[string]any{"periodSeconds": 1, "exec": map[string]any{"command": []string{"/usr/bin/gpuwork", "exit", "0"}}},
}

// restoring is the annotation that asks for a restore.
var restoring = map[string]string{"dev.gpuckpt.restore": "true"}

// pullSecret is the secret with the registry's password.
const pullSecret = "registry"

// givePullSecret makes it, once for a node.
func givePullSecret(t *testing.T, n *node.Node) {
	t.Helper()
	file := filepath.Join(credentialsDir(n), "config.json")
	credentials, err := n.Registry().Credentials()
	if err == nil {
		err = os.MkdirAll(filepath.Dir(file), 0o700)
	}
	if err == nil {
		err = os.WriteFile(file, credentials, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	_, err = n.Kubectl(t.Context(), "create", "secret", "docker-registry", pullSecret, "--from-file=.dockerconfigjson="+file)
	if err != nil && !strings.Contains(err.Error(), "already exists") {
		t.Fatal(err)
	}
}

// credentialsDir is where those who push find the registry's password. The kubelet
// does not look there.
func credentialsDir(n *node.Node) string { return filepath.Join(n.Dir(), "docker") }

// publish makes an image of a kubelet's archive and pushes it into the registry.
// None of it stays in containerd.
func publish(t *testing.T, n *node.Node, archive, name string) (ref string) {
	t.Helper()
	givePullSecret(t, n)
	ref = n.Registry().Host + "/" + name
	where := []string{"--address", n.Address(), "--namespace", node.Namespace, "--quiet"}
	for _, args := range [][]string{
		append([]string{"image", "build", "kubernetes-archive:" + archive, ref}, where...),
		append([]string{"image", "push", "--plain-http", ref}, where...),
	} {
		if _, err := n.OutputEnv(t.Context(), []string{"DOCKER_CONFIG=" + credentialsDir(n)}, "gpuckpt", args...); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.RemoveImage(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	return ref
}

// A pod's checkpoint becomes an image; from a registry that wants a password it
// becomes another pod, with another name, address, secrets and account. The program
// goes on; what the kubelet does with containers it can do with this one.
func TestRestore(t *testing.T) {
	for _, tt := range []struct {
		name        string
		hostNetwork bool
	}{{"bridge", false}, {"host network", true}} {
		t.Run(tt.name, func(t *testing.T) { testRestore(t, tt.hostNetwork) })
	}
}

func testRestore(t *testing.T, hostNetwork bool) {
	result := results.Add(t)
	name := podName(t)
	port := counterPort
	if hostNetwork {
		var err error
		if port, err = harness.FreePort(); err != nil {
			t.Fatal(err)
		}
	}
	old := apply(t, shared(t), name+"-old", counter{hostNetwork: hostNetwork, port: port, pod: surroundings(t, name+"-old"), container: mounts})
	expect(t, old, port, "101")
	archive, err := shared(t).Checkpoint(t.Context(), old.Metadata.Name, "counter", 0)
	if err != nil {
		t.Fatalf("%v\n%s", err, shared(t).LogTail(4000))
	}
	var ref string
	if err := result.Time("build and push", func() error { ref = publish(t, shared(t), archive, name+":1"); return nil }); err != nil {
		t.Fatal(err)
	}
	if hostNetwork { // two cannot have one port
		if _, err := shared(t).Kubectl(t.Context(), "delete", "pod", old.Metadata.Name); err != nil {
			t.Fatal(err)
		}
	}

	var pod node.Pod
	if err := result.Time("run", func() error {
		pod = apply(t, shared(t), name, counter{image: ref, annotations: restoring, hostNetwork: hostNetwork, port: port, pod: surroundings(t, name), container: probed})
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	expect(t, pod, port, "102")
	expect(t, pod, port, "103")
	if !hostNetwork {
		expect(t, old, port, "102") // the old one runs on
		if pod.Status.PodIP == old.Status.PodIP {
			t.Errorf("both pods have the address %s", pod.Status.PodIP)
		}
	}
	hasOwnSurroundings(t, pod)

	t.Run("logs and exec", func(t *testing.T) {
		if out, err := shared(t).Kubectl(t.Context(), "logs", name); err != nil || !strings.HasSuffix(strings.TrimSpace(out), "103") {
			t.Errorf("kubectl logs: %q, %v", out, err)
		}
		if !has("crictl") {
			t.Log("crictl logs is not tested: crictl is not in the bundle")
		} else if out, err := shared(t).Crictl(t.Context(), "logs", pod.Container("counter")); err != nil || !strings.HasSuffix(strings.TrimSpace(out), "103") {
			t.Errorf("crictl logs: %q, %v", out, err)
		}
		if out, err := shared(t).Kubectl(t.Context(), "exec", name, "--", "/usr/bin/gpuwork", "echo", "inside"); err != nil || strings.TrimSpace(out) != "inside" {
			t.Errorf("kubectl exec: %q, %v", out, err)
		}
	})
	t.Run("checkpoint again", func(t *testing.T) {
		archive, err := betweenProbes(t, shared(t), pod, "counter")
		if err != nil {
			t.Fatalf("%v\n%s", err, shared(t).LogTail(3000))
		}
		holdsGPUState(t, archive)
		expect(t, pod, port, "104")
	})
	t.Run("crash", func(t *testing.T) {
		if err := syscall.Kill(pidOf(t, shared(t), pod.Container("counter")), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		again, err := shared(t).WaitFor(t.Context(), name, func(p node.Pod) bool {
			return p.Ready() && p.Status.ContainerStatuses[0].RestartCount == 1
		})
		if err != nil {
			t.Fatalf("%v\n%s", err, shared(t).LogTail(4000))
		}
		expect(t, again, port, "102") // from the image again
	})
	t.Run("delete", func(t *testing.T) {
		pid := pidOf(t, shared(t), current(t, name).Container("counter"))
		if _, err := shared(t).Kubectl(t.Context(), "delete", "pod", name, "--timeout=180s"); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, 0); err == nil {
			t.Errorf("process %d is still there", pid)
		}
	})
}

// current is the pod as the kubelet has it now.
func current(t *testing.T, name string) node.Pod {
	t.Helper()
	pod, err := shared(t).Pod(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	return pod
}

// pidOf is a container's first process.
func pidOf(t *testing.T, n *node.Node, container string) int {
	t.Helper()
	pid, err := n.Pid(t.Context(), container)
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

// hasOwnSurroundings checks that a restored pod has what its own manifest says, and
// nothing of the pod that it was.
func hasOwnSurroundings(t *testing.T, pod node.Pod) {
	t.Helper()
	root := fmt.Sprintf("/proc/%d/root", pidOf(t, shared(t), pod.Container("counter")))
	name := pod.Metadata.Name
	for file, want := range map[string]string{
		"/etc/secret/key": "secret of " + name,
		"/etc/config/key": "config of " + name,
	} {
		if got, err := os.ReadFile(root + file); err != nil || string(got) != want {
			t.Errorf("%s is %q, %v; want %q", file, got, err, want)
		}
	}
	token, err := os.ReadFile(root + "/run/secrets/kubernetes.io/serviceaccount/token")
	if err != nil {
		t.Error(err)
	} else if who := subjectOf(t, string(token)); who != "system:serviceaccount:"+node.PodNamespace+":"+name {
		t.Errorf("its token is that of %s", who)
	}
	hosts, err := os.ReadFile(root + "/etc/hosts")
	if err != nil || pod.Status.PodIP != shared(t).IP() && !strings.Contains(string(hosts), pod.Status.PodIP) {
		t.Errorf("/etc/hosts does not have %s: %q, %v", pod.Status.PodIP, hosts, err)
	}
	for _, file := range []string{"/dev/termination-log", "/cache"} {
		if _, err := os.Stat(root + file); err != nil {
			t.Error(err)
		}
	}
}

// A pod without the secret does not get the image.
func TestPullSecretNeeded(t *testing.T) {
	results.Add(t)
	name := podName(t)
	old := apply(t, shared(t), name+"-old", counter{})
	archive, err := shared(t).Checkpoint(t.Context(), old.Metadata.Name, "counter", 0)
	if err != nil {
		t.Fatal(err)
	}
	c := counter{image: publish(t, shared(t), archive, name+":1"), annotations: restoring}
	if err := shared(t).Apply(t.Context(), c.manifest(name)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := shared(t).Kubectl(context.Background(), "delete", "pod", name, "--timeout=180s"); err != nil {
			t.Error(err)
		}
	})
	pod, err := shared(t).WaitFor(t.Context(), name, func(p node.Pod) bool {
		for _, status := range p.Status.ContainerStatuses {
			if w := status.State.Waiting; w != nil && strings.Contains(w.Reason, "Pull") {
				return true
			}
		}
		return false
	})
	if err != nil {
		t.Fatal(err)
	}
	if why := pod.Status.ContainerStatuses[0].State.Waiting.Message; !strings.Contains(why, "401") && !strings.Contains(why, "authorization") && !strings.Contains(why, "ErrImagePull") && !strings.Contains(why, "Back-off") {
		t.Errorf("the kubelet says %q", why)
	}
}

// Without the annotation the image starts its program afresh.
func TestAfresh(t *testing.T) {
	results.Add(t)
	name := podName(t)
	old := apply(t, shared(t), name+"-old", counter{})
	expect(t, old, counterPort, "101")
	archive, err := shared(t).Checkpoint(t.Context(), old.Metadata.Name, "counter", 0)
	if err != nil {
		t.Fatal(err)
	}
	pod := apply(t, shared(t), name, counter{
		image: publish(t, shared(t), archive, name+":1"),
		pod:   map[string]any{"imagePullSecrets": []any{map[string]any{"name": pullSecret}}},
	})
	expect(t, pod, counterPort, "101")
}

// A pod's image is not restored outside a pod: its network would be another's. The
// error says so.
func TestPodImageOutsideAPod(t *testing.T) {
	results.Add(t)
	needs(t, "ctr")
	name := podName(t)
	pod := apply(t, shared(t), name, counter{})
	archive, err := shared(t).Checkpoint(t.Context(), pod.Metadata.Name, "counter", 0)
	if err != nil {
		t.Fatal(err)
	}
	ref := "gpuckpt.test/" + name + ":1"
	if _, err := shared(t).Output(t.Context(), "gpuckpt", "image", "build", "kubernetes-archive:"+archive, ref, "--address", shared(t).Address(), "--namespace", node.Namespace, "--quiet"); err != nil {
		t.Fatal(err)
	}
	for says, own := range map[string]bool{"the container has a network that the runtime makes": true, "the container has the host's network": false} {
		_, err := shared(t).Run(t.Context(), harness.RunSpec{ID: name, Image: ref, GPUs: []int{0}, OwnNetwork: own, Annotations: restoring})
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("own network %v: %v", own, err)
		}
		if err := shared(t).Remove(t.Context(), name); err != nil {
			t.Error(err)
		}
	}
}
