// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

// render renders deploy/chart as Helm does, and returns what is not empty by template.
func render(t *testing.T, values string) map[string]string {
	t.Helper()
	chart, err := loader.Load("../../deploy/chart")
	if err != nil {
		t.Fatal(err)
	}
	given, err := chartutil.ReadValues([]byte(values))
	if err != nil {
		t.Fatal(err)
	}
	all, err := chartutil.ToRenderValues(chart, given, chartutil.ReleaseOptions{Name: "gpuckpt", Namespace: "gpuckpt"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	rendered, err := engine.Render(chart, all)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for name, text := range rendered {
		if strings.TrimSpace(text) != "" {
			found[filepath.Base(name)] = text
		}
	}
	return found
}

// canonical returns a document of YAML as JSON.
func canonical(t *testing.T, text string) string {
	t.Helper()
	data, err := yaml.YAMLToJSONStrict([]byte(text))
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	return string(data)
}

// withAgent are the values of the agent beside the defaults.
const withAgent = "agent: {enabled: true}"

// objects returns the documents of templates as JSON, by kind and name.
func objects(t *testing.T, texts ...string) map[string]string {
	t.Helper()
	found := map[string]string{}
	for _, text := range texts {
		for document := range strings.SplitSeq(text, "\n---\n") {
			var o struct {
				Kind     string
				Metadata struct{ Name string }
			}
			if err := yaml.Unmarshal([]byte(document), &o); err != nil {
				t.Fatalf("%v in\n%s", err, document)
			}
			found[o.Kind+"/"+o.Metadata.Name] = canonical(t, document)
		}
	}
	return found
}

// The chart's objects are those of deploy/node, and with the agent those of deploy/agent as well,
// which Kustomize takes.
func TestChartIsKustomization(t *testing.T) {
	for _, c := range []struct {
		values string
		dirs   []string
		count  int
	}{
		{"", []string{"node"}, 2},
		{withAgent, []string{"node", "agent"}, 24},
	} {
		want := map[string]string{}
		for _, dir := range c.dirs {
			built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), "../../deploy/"+dir)
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range built.Resources() {
				text, err := r.AsYAML()
				if err != nil {
					t.Fatal(err)
				}
				if r.GetKind() != "Namespace" { // Helm makes it: --create-namespace
					want[r.GetKind()+"/"+r.GetName()] = canonical(t, string(text))
				}
			}
		}
		got := objects(t, slices.Collect(maps.Values(render(t, c.values)))...)
		for name, object := range want {
			if got[name] != object {
				t.Errorf("of %s, Kustomize has\n%s\nand the chart\n%s", name, object, got[name])
			}
		}
		if len(got) != len(want) || len(got) != c.count {
			t.Errorf("%q: %d objects of Kustomize, %d of the chart", c.values, len(want), len(got))
		}
	}
}

// Each value of the agent reaches the agent, and with uninstall there is none.
func TestChartAgent(t *testing.T) {
	controller := render(t, "agent: {enabled: true, controller: {replicas: 2, args: [--plain-http], nodeSelector: {a: b}, tolerations: [{operator: Exists}]}}")["controller-deployment.yaml"]
	canonical(t, controller)
	for _, word := range []string{"replicas: 2", `"--plain-http"`, "a: b", "operator: Exists"} {
		if !strings.Contains(controller, word) {
			t.Errorf("no %q in\n%s", word, controller)
		}
	}
	text := render(t, "{agent: {enabled: true, containerd: /c.sock, hooks: 'localhost:1', args: [--plain-http]}, image: {repository: r.example/node, tag: '9'}, imagePullSecrets: [{name: s}]}")["agent-daemonset.yaml"]
	canonical(t, text)
	for _, word := range []string{"--containerd=/c.sock", "--hooks=localhost:1", `"--plain-http"`, `image: "r.example/node:9"`, "name: s"} {
		if !strings.Contains(text, word) {
			t.Errorf("no %q in\n%s", word, text)
		}
	}
	if out := render(t, "{agent: {enabled: true}, uninstall: true}"); out["agent-daemonset.yaml"] != "" || out["controller-deployment.yaml"] != "" || out["agent-crds.yaml"] == "" {
		t.Error("with uninstall, the agent is to go and what it made is to stay")
	}
}

// Values reach the objects.
func TestChartValues(t *testing.T) {
	for _, c := range []struct {
		values      string
		has, hasNot []string
	}{
		{"uninstall: true", []string{"- uninstall", "--restart"}, []string{"- install"}},
		{"{prefix: /opt/gpuckpt, containerdConfig: /etc/c.toml, restart: false}", []string{"- --prefix=/opt/gpuckpt", "- --containerd-config=/etc/c.toml"}, []string{"--restart"}},
		{"{image: {repository: r.example/node, tag: '9'}, imagePullSecrets: [{name: s}]}", []string{"image: \"r.example/node:9\"", "name: s"}, nil},
		{"metrics: {port: 9999, state: /run/k3s/containerd}", []string{"--listen=:9999", "path: /run/k3s/containerd"}, []string{"[wait]"}},
		{"metrics: {port: 0}", []string{"[wait]"}, []string{"--listen", "path: /run/containerd"}},
		{"nodeSelector: null", []string{"privileged: true"}, []string{"nvidia.com/gpu.present"}},
	} {
		text := render(t, c.values)["daemonset.yaml"]
		canonical(t, text)
		for _, word := range c.has {
			if !strings.Contains(text, word) {
				t.Errorf("%s: no %q in\n%s", c.values, word, text)
			}
		}
		for _, word := range c.hasNot {
			if strings.Contains(text, word) {
				t.Errorf("%s: %q in\n%s", c.values, word, text)
			}
		}
	}
	if out := render(t, "runtimeClass: {create: false}"); out["runtimeclass.yaml"] != "" {
		t.Error("a RuntimeClass that was not asked for")
	}
}

// With UPDATE set the test writes deploy/node and deploy/agent anew.
func TestUpdate(t *testing.T) {
	if os.Getenv("UPDATE") == "" {
		return
	}
	node := render(t, "")
	for name, text := range render(t, withAgent) {
		dir := "../../deploy/agent"
		if node[name] != "" {
			dir = "../../deploy/node"
		}
		head := "# Copyright The gpuckpt Authors.\n# SPDX-License-Identifier: Apache-2.0\n#\n# Of deploy/chart with its defaults; a test compares.\n"
		if err := os.WriteFile(filepath.Join(dir, name), []byte(head+strings.TrimSpace(text)+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
