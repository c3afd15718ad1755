// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
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

// The chart's objects are those of deploy/node, which Kustomize takes.
func TestChartIsKustomization(t *testing.T) {
	built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), "../../deploy/node")
	if err != nil {
		t.Fatal(err)
	}
	kinds := 0
	chart := render(t, "")
	for _, r := range built.Resources() {
		text, err := r.AsYAML()
		if err != nil {
			t.Fatal(err)
		}
		if r.GetKind() == "Namespace" { // Helm makes it: --create-namespace
			continue
		}
		kinds++
		if got, want := canonical(t, string(text)), canonical(t, chart[strings.ToLower(r.GetKind())+".yaml"]); got != want {
			t.Errorf("deploy/node has\n%s\nand the chart\n%s", got, want)
		}
	}
	if kinds != len(chart) || kinds != 2 {
		t.Errorf("%d objects in deploy/node, %d in the chart", kinds, len(chart))
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

// With UPDATE set the test writes deploy/node anew.
func TestUpdate(t *testing.T) {
	if os.Getenv("UPDATE") == "" {
		return
	}
	for name, text := range render(t, "") {
		head := "# Copyright The gpuckpt Authors.\n# SPDX-License-Identifier: Apache-2.0\n#\n# Of deploy/chart with its defaults; a test compares.\n"
		if err := os.WriteFile(filepath.Join("../../deploy/node", name), []byte(head+text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
