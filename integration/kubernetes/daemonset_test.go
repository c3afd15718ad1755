// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/docs/commands"
	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
)

// nodeImage is the image that deploy/node names.
const nodeImage = "ghcr.io/gpuckpt/node:0.0.0"

// systemctl stands for systemd's on the node: it knows containerd's unit, and has the test restart it.
const systemctl = `#!/bin/sh
case "$1" in
is-active) [ "$3" = containerd ] ;;
show) echo process ;;
restart) touch %[1]s/asked; while [ ! -e %[1]s/done ]; do sleep 0.05; done; rm %[1]s/done ;;
*) exit 1 ;;
esac
`

// deploy/node in a cluster with controllers: the DaemonSet installs the runtime on a node that lacks
// it, restarts containerd and lives on. GPU pods then run with it, are checkpointed by the kubelet,
// and live through another restart, also suspended. The removal waits for the last of them, and
// leaves nothing. GPUCKPT_NODE_IMAGE and GPUCKPT_CHART name the image and the chart of a release:
// then the nodes pull it from a registry, and helm installs it, by the lines of docs/install.md.
func TestDaemonSet(t *testing.T) {
	results.Add(t)
	needs(t, "gpuckpt-agent")
	needs(t, "kube-controller-manager")
	for _, dir := range []string{"/etc/kubernetes/node-feature-discovery", "/usr/local/bin"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	place := t.TempDir()
	program, err := bins.Path("containerd")
	if err == nil {
		err = errors.Join(
			os.WriteFile("/usr/local/bin/systemctl", fmt.Appendf(nil, systemctl, place), 0o755),
			os.Symlink(program, "/usr/local/bin/containerd"),
		)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(os.Remove("/usr/local/bin/systemctl"), os.Remove("/usr/local/bin/containerd")); err != nil {
			t.Error(err)
		}
	})

	n := own(t, node.Options{
		APIServer: true, Controllers: true, Runtime: "runc",
		Runtimes: "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\nruntime_type = \"io.containerd.runc.v2\"\n",
	})
	kubectl := func(args ...string) string {
		t.Helper()
		out, err := n.Kubectl(t.Context(), args...)
		if err != nil {
			t.Fatalf("%v\n%s\n%s", err, n.KubeletLog(3000), n.LogTail(2000))
		}
		return out
	}
	go func() {
		if err := n.Schedule(t.Context()); err != nil {
			t.Errorf("the scheduler: %v", err)
		}
	}()
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		for _, args := range [][]string{
			{"describe", "pods", "--namespace", "gpuckpt"},
			{"logs", "--namespace", "gpuckpt", "--selector", "app.kubernetes.io/name=gpuckpt-node", "--container", "install"},
		} {
			out, err := n.Kubectl(session.Context(), args...)
			t.Logf("%s\n%v", out, err)
		}
	})
	chart := os.Getenv("GPUCKPT_CHART")
	if chart == "" {
		importNodeImage(t, n)
	}
	before := map[string]map[string]bool{}
	for dir, c := range places {
		if before[dir], err = c.New(); err != nil {
			t.Fatal(err)
		}
	}
	config := read(t, n.ConfigPath())
	kubectl("delete", "runtimeclass", "gpuckpt") // of the other tests
	patch := func(operation, path string, value any) {
		t.Helper()
		data, err := json.Marshal([]any{map[string]any{"op": operation, "path": path, "value": value}})
		if err != nil {
			t.Fatal(err)
		}
		kubectl("patch", "--namespace", "gpuckpt", "daemonset", "gpuckpt-node", "--type=json", "--patch", string(data))
	}
	rolledOut := func() {
		t.Helper()
		kubectl("rollout", "status", "--namespace", "gpuckpt", "daemonset/gpuckpt-node", "--timeout=180s")
	}

	const setting = "lock_timeout = \"20s\"\n"
	tasks := filepath.Join(n.Dir(), "state", "io.containerd.runtime.v2.task")
	if chart == "" {
		kubectl("apply", "-k", filepath.Join(sourceDir(t), "deploy", "node"))
		// The chart's values metrics.logs and containerdConfig.
		patch("replace", "/spec/template/spec/volumes/0/hostPath/path", n.CRIULogs())
		patch("add", "/spec/template/spec/initContainers/0/args/-", "--containerd-config="+n.ConfigPath())
		patch("replace", "/spec/template/spec/volumes/1/hostPath/path", tasks)
		// Its value config.
		kubectl("create", "configmap", "gpuckpt-node", "--namespace", "gpuckpt", "--from-literal=config.toml="+setting)
		patch("add", "/spec/template/spec/volumes/-", map[string]any{"name": "config", "configMap": map[string]any{"name": "gpuckpt-node"}})
		patch("add", "/spec/template/spec/initContainers/0/volumeMounts/-", map[string]any{"name": "config", "mountPath": "/settings/config.toml", "subPath": "config.toml", "readOnly": true})
	} else {
		values := pushNodeImage(t, n)
		helm(t, n, "A cluster", "helm install ", append(values, "metrics.logs="+n.CRIULogs(), "metrics.state="+filepath.Dir(tasks), "containerdConfig="+n.ConfigPath(), "config.lock_timeout=20s", "uninstallHook=false")...)
	}
	kubectl("label", "node", node.Name, "nvidia.com/gpu.present=true")
	within(t, "containerd is to be restarted", func() bool { return os.Remove(filepath.Join(place, "asked")) == nil })
	restart := func() {
		t.Helper()
		if err := n.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	restart()
	if err := os.WriteFile(filepath.Join(place, "done"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	rolledOut()
	if features := read(t, "/etc/kubernetes/node-feature-discovery/features.d/gpuckpt"); !strings.Contains(features, "gpuckpt.version=") {
		t.Errorf("Node Feature Discovery reads %q", features)
	}

	if text := read(t, "/etc/gpuckpt/config.toml"); text != setting {
		t.Errorf("the node's configuration is %q", text)
	}

	running := apply(t, n, "running", counter{class: "gpuckpt"})
	suspended := apply(t, n, "suspended", counter{class: "gpuckpt"})
	gpuckpt := func(verb, id string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "/usr/local/bin/gpuckpt", verb, id, "--address", n.Address(), "--namespace", node.Namespace)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s\n%s", err, out, n.LogTail(3000))
		}
	}
	expect(t, running, counterPort, "101")
	expect(t, suspended, counterPort, "101")
	gpuckpt("suspend", suspended.Container("counter"))
	installer := kubectl("get", "pods", "--namespace", "gpuckpt", "--output", "jsonpath={.items[*].metadata.uid}")
	restart()
	expect(t, running, counterPort, "102")
	gpuckpt("resume", suspended.Container("counter"))
	expect(t, suspended, counterPort, "102")
	// The kubelet may not have found yet that containerd is back.
	within(t, "the kubelet reaches containerd", func() bool {
		_, err = n.Checkpoint(t.Context(), "running", "counter", 0)
		return err == nil || !strings.Contains(err.Error(), "code = Unavailable")
	})
	if err != nil {
		t.Fatalf("%v\n%s", err, n.LogTail(3000))
	}
	expect(t, running, counterPort, "103")
	rolledOut()
	address := kubectl("get", "pods", "--namespace", "gpuckpt", "--output", "jsonpath={.items[0].status.podIP}")
	if text := get(t, "http://"+address+":9402/metrics"); !strings.Contains(text, `gpuckpt_operations_total{operation="checkpoint",outcome="success"} 1`) {
		t.Errorf("the metrics are %s", text)
	}
	// What the metrics' container has of containerd are the bundles, and no socket to ask it by.
	bundles := 0
	if err := filepath.WalkDir(tasks, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // a container that has just ended
		}
		if err == nil && d.Type() == fs.ModeSocket {
			t.Errorf("the metrics' container sees the socket %s", path)
		}
		if err == nil && d.Name() == "config.json" {
			bundles++
		}
		if d != nil && d.Name() == "rootfs" {
			return fs.SkipDir
		}
		return err
	}); err != nil || bundles == 0 {
		t.Errorf("%d bundles, %v", bundles, err)
	}
	// It cannot write to the root file systems of containers, which are mounted below.
	roots := 0
	for line := range strings.SplitSeq(read(t, fmt.Sprintf("/proc/%d/mountinfo", metricsPid(t))), "\n") {
		f := strings.Fields(line)
		if len(f) > 5 && strings.HasPrefix(f[4], "/run/containerd/io.containerd.runtime.v2.task/") {
			roots++
			if !slices.Contains(strings.Split(f[5], ","), "ro") {
				t.Errorf("the metrics' container may write to %s (%s)", f[4], f[5])
			}
		}
	}
	if roots == 0 {
		t.Error("the metrics' container sees no root file system: look for another way to test this")
	}
	if now := kubectl("get", "pods", "--namespace", "gpuckpt", "--output", "jsonpath={.items[*].metadata.uid} {.items[*].status.containerStatuses[*].restartCount}"); now != installer+" 0" {
		t.Errorf("the DaemonSet's pod was %s and is %s", installer, now)
	}

	// An upgrade under load.
	if chart != "" {
		helmed := func(args ...string) {
			t.Helper()
			if out, err := n.OutputEnv(t.Context(), append(n.KubectlEnv(), "HOME="+t.TempDir()), "helm", append(args, "--namespace", "gpuckpt")...); err != nil {
				t.Fatalf("helm %q: %v\n%s", args, err, out)
			}
		}
		helmed("upgrade", "gpuckpt", chart, "--reset-then-reuse-values", "--set", "config.lock_timeout=25s", "--set", "networkPolicy=true")
		rolledOut()
		if text := read(t, "/etc/gpuckpt/config.toml"); text != "lock_timeout = \"25s\"\n" {
			t.Errorf("after the upgrade the node's configuration is %q", text)
		}
		helmed("test", "gpuckpt")
		if _, err := n.Checkpoint(t.Context(), "running", "counter", 0); err != nil {
			t.Fatalf("%v\n%s", err, n.LogTail(3000))
		}
		expect(t, running, counterPort, "104")
	}

	// What the chart's hook runs. A pod of this cluster could not ask the API server, which is at an
	// address of the host alone.
	uninstalled := make(chan error, 1)
	go func() {
		_, err := n.OutputEnv(t.Context(), n.KubectlEnv(), "gpuckpt-agent", "--uninstall-from=gpuckpt")
		uninstalled <- err
	}()
	within(t, "the removal waits for the pods", func() bool {
		out, err := n.Kubectl(t.Context(), "logs", "--namespace", "gpuckpt", "--selector", "app.kubernetes.io/name=gpuckpt-node", "--container", "uninstall")
		return err == nil && strings.Contains(out, "containers still run with gpuckpt's shim")
	})
	kubectl("delete", "pod", "running", "suspended")
	within(t, "containerd is to be restarted", func() bool { return os.Remove(filepath.Join(place, "asked")) == nil })
	restart()
	if err := os.WriteFile(filepath.Join(place, "done"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := <-uninstalled; err != nil {
		t.Fatal(err)
	}
	if chart == "" {
		kubectl("delete", "-k", filepath.Join(sourceDir(t), "deploy", "node"), "--timeout=180s")
	} else {
		helm(t, n, "Uninstall", "helm uninstall ")
		kubectl("delete", "namespace", "gpuckpt", "--timeout=180s")
	}
	if now := read(t, n.ConfigPath()); now != config {
		t.Errorf("containerd's configuration is %s", now)
	}
	for dir, c := range places {
		now, err := c.New()
		if err != nil {
			t.Fatal(err)
		}
		for name := range now {
			others := strings.HasPrefix(name, "cni") || strings.HasPrefix(name, "containers") // skopeo's cache
			if !before[dir][name] && !others {
				t.Errorf("left: %s/%s", dir, name)
			}
		}
	}
}

// helm runs the line of a section of docs/install.md that begins with those words, with the chart of
// the release and more values.
func helm(t *testing.T, n *node.Node, section, begin string, values ...string) {
	t.Helper()
	args := strings.Fields(strings.ReplaceAll(line(t, section, begin), "gpuckpt-chart-VERSION.tgz", os.Getenv("GPUCKPT_CHART")))[1:]
	for _, value := range values {
		args = append(args, "--set", value)
	}
	t.Logf("helm %q", args)
	out, err := n.OutputEnv(t.Context(), append(n.KubectlEnv(), "HOME="+t.TempDir()), "helm", args...)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// line returns the command of a section of docs/install.md that begins with those words.
func line(t *testing.T, section, begin string) string {
	t.Helper()
	lines, err := commands.Of(filepath.Join(sourceDir(t), "docs", "install.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range lines {
		if l.Section == section && strings.HasPrefix(l.Text, begin) {
			return l.Text
		}
	}
	t.Fatalf("docs/install.md has no line %q… in %q", begin, section)
	return ""
}

// pushNodeImage takes the image of a release to where a cluster without a network has it, by the lines
// of docs/install.md: the node's containerd, and a registry. It returns the values of the chart with
// which the nodes pull it from there.
func pushNodeImage(t *testing.T, n *node.Node) []string {
	t.Helper()
	repository := n.Registry().Host + "/gpuckpt/node"
	user, password := n.Registry().Login()
	run := func(begin string, more ...string) {
		t.Helper()
		text := strings.NewReplacer("gpuckpt-node-VERSION.oci.tar", os.Getenv("GPUCKPT_NODE_IMAGE"), "registry.example.com/gpuckpt/node:VERSION", repository+":release").Replace(line(t, "Offline", begin))
		args := append(strings.Fields(text), more...)
		if out, err := n.Output(t.Context(), args[0], args[1:]...); err != nil {
			t.Fatalf("%s: %v\n%s", text, err, out)
		}
	}
	run("ctr ", "--address", n.Address())
	run("skopeo ", "--dest-tls-verify=false", "--dest-creds", user+":"+password)
	givePullSecret(t, n)
	for _, args := range [][]string{
		{"create", "namespace", "gpuckpt"},
		{"create", "secret", "docker-registry", pullSecret, "--namespace", "gpuckpt", "--from-file=.dockerconfigjson=" + filepath.Join(credentialsDir(n), "config.json")},
	} {
		if _, err := n.Kubectl(t.Context(), args...); err != nil {
			t.Fatal(err)
		}
	}
	return []string{"image.repository=" + repository, "image.tag=release", "imagePullSecrets[0].name=" + pullSecret}
}

func get(t *testing.T, url string) string {
	t.Helper()
	answer, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// importNodeImage makes an image like a release's, of the programs under test.
func importNodeImage(t *testing.T, n *node.Node) {
	t.Helper()
	programs, err := bins.Release()
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for place, path := range programs {
		files["/opt/gpuckpt/"+place] = path
	}
	if files["/opt/gpuckpt/agent/gpuckpt-agent"], err = bins.Path("gpuckpt-agent"); err != nil {
		t.Fatalf("%v; run `make agent`", err)
	}
	image, err := harness.BuildImage(t.Context(), harness.ImageSpec{Files: files, Entrypoint: []string{"/opt/gpuckpt/bin/gpuckpt"}})
	if err == nil {
		err = n.Import(t.Context(), nodeImage, image)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// metricsPid returns the process that serves the metrics.
func metricsPid(t *testing.T) int {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range all {
		text, _ := os.ReadFile(file) // of one that has ended there is none
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil && strings.Contains(string(text), "\x00--listen=:9402\x00") {
			return pid
		}
	}
	t.Fatal("no process serves the metrics")
	return 0
}
