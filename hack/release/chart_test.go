// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

// render renders deploy/chart as Helm does, and returns what is not empty by template.
func render(t *testing.T, values string) map[string]string {
	t.Helper()
	found, err := renderAll(t, values)
	if err != nil {
		t.Fatal(err)
	}
	delete(found, "NOTES.txt")
	return found
}

// renderAll is render, with the notes, and with values that may be refused.
func renderAll(t *testing.T, values string) (map[string]string, error) {
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
		return nil, err
	}
	rendered, err := engine.Render(chart, all)
	if err != nil {
		return nil, err
	}
	found := map[string]string{}
	for name, text := range rendered {
		if strings.TrimSpace(text) != "" {
			found[filepath.Base(name)] = text
		}
	}
	return found, nil
}

// schema is what a definition says of a field.
type schema struct {
	Type, Description string
	Minimum, Maximum  int
	Properties        map[string]schema
	Items             *schema
}

func (s schema) explained(t *testing.T, path string) {
	t.Helper()
	if s.Items != nil {
		s.Items.explained(t, path)
	}
	for name, field := range s.Properties {
		if field.Description == "" && field.Properties == nil {
			t.Errorf("%s.%s has no description", path, name)
		}
		if field.Type == "integer" && strings.Contains(path, " spec") && (field.Minimum < 1 || field.Maximum == 0) { // 0 is the default
			t.Errorf("%s.%s has no bounds", path, name)
		}
		field.explained(t, path+"."+name)
	}
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

// What Helm alone runs.
const (
	uninstallHook = "uninstall-hook.yaml"
	testHook      = "test-hook.yaml"
)

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
		{withAgent, []string{"node", "agent"}, 26},
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
		all := render(t, c.values)
		delete(all, uninstallHook)
		delete(all, testHook)
		got := objects(t, slices.Collect(maps.Values(all))...)
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
	for _, word := range []string{"replicas: 2", `"--plain-http"`, "a: b", "operator: Exists"} {
		if !strings.Contains(controller, word) {
			t.Errorf("no %q in\n%s", word, controller)
		}
	}
	text := render(t, "{agent: {enabled: true, containerd: /c.sock, hooks: 'localhost:1', args: [--plain-http]}, image: {repository: r.example/node, tag: '9'}, imagePullSecrets: [{name: s}]}")["agent-daemonset.yaml"]
	for _, word := range []string{"--containerd=/c.sock", "--hooks=localhost:1", "terminationGracePeriodSeconds: 3600", "maxUnavailable: 10%", "priorityClassName: system-node-critical", `"--plain-http"`, `image: "r.example/node:9"`, "name: s"} {
		if !strings.Contains(text, word) {
			t.Errorf("no %q in\n%s", word, text)
		}
	}
	for values, want := range map[string]bool{"agent: {enabled: true}": true, "agent: {enabled: true, trust: false}": false} {
		out := render(t, values)
		if trusts := strings.Contains(out["agent-rbac.yaml"], "nodekeys") && !strings.Contains(out["agent-daemonset.yaml"], "--trust=false"); trusts != want {
			t.Errorf("%s: keys of nodes count: %t", values, trusts)
		}
	}
	// Of several who apply conditions each has its own.
	if crds := render(t, "agent: {enabled: true}")["agent-crds.yaml"]; strings.Count(crds, "conditions:\n") != strings.Count(crds, "x-kubernetes-list-map-keys: [type]") {
		t.Error("conditions are no map by their types")
	}
	// kubectl explain says what each field is.
	for name, text := range objects(t, render(t, withAgent)["agent-crds.yaml"]) {
		var crd struct {
			Spec struct {
				Versions []struct {
					Schema struct{ OpenAPIV3Schema schema }
				}
			}
		}
		if err := json.Unmarshal([]byte(text), &crd); err != nil {
			t.Fatal(err)
		}
		for _, part := range []string{"spec", "status"} {
			crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties[part].explained(t, name+" "+part)
		}
	}
	// Secrets are those of all namespaces, or of some.
	for values, want := range map[string]string{"agent: {enabled: true}": "ClusterRoleBinding/gpuckpt-push-secrets", "agent: {enabled: true, namespaces: [a, b]}": "RoleBinding/gpuckpt-push-secrets"} {
		all := objects(t, render(t, values)["controller-rbac.yaml"])
		if _, ok := all["ClusterRoleBinding/gpuckpt-push-secrets"]; ok != strings.HasPrefix(want, "Cluster") || all[want] == "" {
			t.Errorf("%s: there is no %s alone", values, want)
		}
	}
	// Who edits a namespace makes its objects, and no keys of nodes.
	for role, verb := range map[string]string{"view": "watch", "edit": "create"} {
		text := objects(t, render(t, withAgent)["controller-rbac.yaml"])["ClusterRole/gpuckpt-"+role]
		if !strings.Contains(text, `"rbac.authorization.k8s.io/aggregate-to-`+role+`":"true"`) || !strings.Contains(text, verb) || !strings.Contains(text, "migrations") || strings.Contains(text, "nodekeys") {
			t.Errorf("%s: %s", role, text)
		}
	}
	rules := render(t, "agent: {enabled: true, repositories: [r.test, s.test/a]}")["policies.yaml"]
	if !strings.Contains(rules, "'r.test,s.test/a'") {
		t.Errorf("no repositories in\n%s", rules)
	}
	if strings.Contains(rules, "serviceaccount:gpuckpt:") { // which Kustomize does not replace in a text
		t.Errorf("agents of another namespace are not bound to their nodes:\n%s", rules)
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
		{"uninstall: true", []string{"- uninstall", "--restart", "maxUnavailable: 100%"}, []string{"- install"}},
		{"{prefix: /opt/gpuckpt, containerdConfig: /etc/c.toml, restart: false}", []string{"- --prefix=/opt/gpuckpt", "- --containerd-config=/etc/c.toml"}, []string{"--restart"}},
		{"{image: {repository: r.example/node, tag: '9'}, imagePullSecrets: [{name: s}]}", []string{"image: \"r.example/node:9\"", "name: s"}, nil},
		{"metrics: {port: 9999, state: /run/k3s/containerd}", []string{"--listen=:9999", "path: /run/k3s/containerd"}, []string{"[wait]"}},
		{"{config: {log_dir: /data/logs}, metrics: {logs: /other}}", []string{"path: /data/logs"}, []string{"/other"}},
		{"metrics: {port: 0}", []string{"[wait]"}, []string{"--listen", "path: /run/containerd"}},
		{"{image: {digest: 'sha256:" + strings.Repeat("0", 64) + "'}, priorityClassName: own, podAnnotations: {a: b}}", []string{"node@sha256:000", "priorityClassName: own", "a: b"}, []string{"node:0.0.0"}},
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
	hook := render(t, "image: {repository: r.example/node}")[uninstallHook]
	for name, object := range objects(t, hook) {
		if !strings.Contains(object, `"helm.sh/hook":"pre-delete"`) {
			t.Errorf("%s stays with the release", name)
		}
	}
	if !strings.Contains(hook, `image: "r.example/node:0.0.0"`) || !strings.Contains(hook, "--uninstall-from=gpuckpt") || render(t, "uninstallHook: false")[uninstallHook] != "" {
		t.Errorf("%s", hook)
	}
	test := render(t, "{runtimeClass: {name: gpus}, affinity: {nodeAffinity: {}}}")[testHook]
	if pod := objects(t, test)["Pod/gpuckpt-test"]; !strings.Contains(pod, `"helm.sh/hook":"test"`) || !strings.Contains(pod, `"runtimeClassName":"gpus"`) || !strings.Contains(pod, "nodeAffinity") {
		t.Errorf("helm test runs %s", test)
	}
	policy := render(t, "{networkPolicy: true, metrics: {port: 9000}}")["networkpolicy.yaml"]
	if p := objects(t, policy)["NetworkPolicy/gpuckpt"]; !strings.Contains(p, `"ingress":[{"ports":[{"port":9000}]}]`) {
		t.Errorf("the policy is %s", policy)
	}
	if policy = render(t, "{networkPolicy: true, metrics: {port: 0}}")["networkpolicy.yaml"]; policy == "" || strings.Contains(policy, "ingress:") {
		t.Errorf("without metrics the policy is %s", policy)
	}
	// Of all pods, which keep what selects them.
	for name, text := range render(t, "{podLabels: {team: a}, agent: {enabled: true}}") {
		if pods, has := strings.Count(text, "  template:\n"), strings.Count(text, "\n        team: a\n"); pods != has || pods > strings.Count(text, "\n        app.kubernetes.io/name: gpuckpt-") {
			t.Errorf("%s: %d of %d pods have the label:\n%s", name, has, pods, text)
		}
	}
	if out := render(t, "runtimeClass: {create: false}"); out["runtimeclass.yaml"] != "" {
		t.Error("a RuntimeClass that was not asked for")
	}
}

// leaves are the values of a map that are none, by their paths. An empty map is a value.
func leaves(m map[string]any, under string, found map[string]any) map[string]any {
	for key, value := range m {
		if inner, ok := value.(map[string]any); ok && len(inner) > 0 && key != "affinity" && key != "resources" && key != "nodeSelector" {
			leaves(inner, under+key+".", found)
			continue
		}
		found[under+key] = value
	}
	return found
}

// Each value is in the schema, which refuses others, and has a template that uses it.
func TestChartHasUsers(t *testing.T) {
	var values map[string]any
	var schema struct{ Properties map[string]any }
	for file, into := range map[string]any{"values.yaml": &values, "values.schema.json": &schema} {
		text, err := os.ReadFile("../../deploy/chart/" + file)
		if err == nil {
			err = yaml.Unmarshal(text, into)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	files, err := filepath.Glob("../../deploy/chart/templates/*")
	if err != nil {
		t.Fatal(err)
	}
	var templates strings.Builder
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		templates.Write(text)
	}
	all := leaves(values, "", map[string]any{})
	for path := range all {
		if !strings.Contains(templates.String(), ".Values."+path) && !strings.HasPrefix(path, "image.") {
			t.Errorf("no template uses %s", path)
		}
		properties := schema.Properties
		names := strings.Split(path, ".")
		for i, name := range names {
			found, ok := properties[name].(map[string]any)
			if !ok {
				t.Errorf("the schema does not have %s", path)
				break
			}
			if i < len(names)-1 {
				properties, _ = found["properties"].(map[string]any)
			}
		}
	}
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	named := 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, value := range regexp.MustCompile("`((agent|encryption|image|metrics|runtimeClass|trust)[.][.a-zA-Z]+)`").FindAllStringSubmatch(string(text), -1) {
			if _, ok := all[value[1]]; !ok {
				t.Errorf("%s names %s, which is no value", page, value[1])
			}
			named++
		}
	}
	if len(all) < 30 || named < 10 {
		t.Errorf("%d values were looked at, and %d in documents", len(all), named)
	}
	for _, wrong := range []string{
		"images: {}", "image: {digest: latest}", "agent: {enable: true}", "agent: {repositories: ['https://r.test']}", "metrics: {port: http}",
		"podLabels: {app.kubernetes.io/name: other}", "metrics: {labels: {release: 1}}", "metrics: {labels: {grafana_dashboard: '1'}}",
		"trust: {keys: {a: no key}}", "agent: {controller: {keepKeys: month}}", "tolerations: {}", "resources: {cpu: 1}",
	} {
		if _, err := renderAll(t, wrong); err == nil {
			t.Errorf("%s is taken", wrong)
		}
	}
}

const aKey = "-----BEGIN PUBLIC KEY-----\nMFkw\n-----END PUBLIC KEY-----\n"

// What configures the nodes is where gpuckpt install --settings looks for it, and other settings are
// installed by another pod. With nothing set there is no ConfigMap, and no volume.
func TestChartSettings(t *testing.T) {
	type pod struct {
		Spec struct {
			Template struct {
				Metadata struct{ Annotations map[string]string }
				Spec     struct {
					Volumes        []map[string]any
					InitContainers []struct {
						Args         []string
						VolumeMounts []struct{ Name, MountPath, SubPath string }
					}
				}
			}
		}
	}
	read := func(values string) (node pod, texts map[string]string) {
		t.Helper()
		found := render(t, values)
		var settings struct{ Data map[string]string }
		for file, into := range map[string]any{"daemonset.yaml": &node, "settings.yaml": &settings} {
			if err := yaml.Unmarshal([]byte(found[file]), into); err != nil {
				t.Fatalf("%v in\n%s", err, found[file])
			}
		}
		return node, settings.Data
	}
	values := `{config: {lock_timeout: 20s, staging: {memory_limit: 68719476736, steer: false}, criu: {options: {ghost-limit: 10485760}}, restore: {images: ["r.test/*:*"]}},
		trust: {keys: {old: "` + strings.ReplaceAll(aKey, "\n", "\\n") + `"}, configMaps: [cosign], secrets: [kms]},
		encryption: {recipients: {backup: "` + strings.ReplaceAll(aKey, "\n", "\\n") + `"}, secrets: [private]}}`
	node, texts := read(values)
	for _, line := range []string{`lock_timeout = "20s"`, "memory_limit = 68719476736", "ghost-limit = 10485760", "steer = false", `images = ["r.test/*:*"]`, "[encryption]", `recipients = ["/etc/gpuckpt/recipients"]`} {
		if !slices.ContainsFunc(strings.Split(texts["config.toml"], "\n"), func(l string) bool { return strings.TrimSpace(l) == line }) {
			t.Errorf("no %s in\n%s", line, texts["config.toml"])
		}
	}
	if texts["keys.old.pub"] != aKey || texts["recipients.backup.pub"] != aKey {
		t.Errorf("%q", texts)
	}
	spec := node.Spec.Template.Spec
	var mounted []string
	for _, m := range spec.InitContainers[0].VolumeMounts {
		if !slices.ContainsFunc(spec.Volumes, func(v map[string]any) bool { return v["name"] == m.Name }) {
			t.Errorf("no volume %s", m.Name)
		}
		mounted = append(mounted, m.MountPath)
	}
	slices.Sort(mounted)
	if want := []string{"/host", "/settings/config.toml", "/settings/decryption-keys/secret-0", "/settings/keys/chart", "/settings/keys/configmap-0", "/settings/keys/secret-0", "/settings/recipients/chart"}; !slices.Equal(mounted, want) {
		t.Errorf("mounted are %q, want %q", mounted, want)
	}
	if !slices.Contains(spec.InitContainers[0].Args, "--settings=/settings") {
		t.Errorf("%q", spec.InitContainers[0].Args)
	}
	mark := node.Spec.Template.Metadata.Annotations["gpuckpt.dev/settings"]
	other, _ := read(strings.Replace(values, "20s", "30s", 1))
	if now := other.Spec.Template.Metadata.Annotations["gpuckpt.dev/settings"]; mark == "" || now == mark {
		t.Errorf("the settings are %q, and %q when they are others", mark, now)
	}
	if _, texts = read("{config: {encryption: {recipients: [/own]}}, " + values[strings.Index(values, "encryption:"):]); !strings.Contains(texts["config.toml"], `recipients = ["/own", "/etc/gpuckpt/recipients"]`) {
		t.Errorf("the chart's recipients, or the node's own, do not count:\n%s", texts["config.toml"])
	}
	for trusted, keys := range map[string]string{"trust: {secrets: [kms]}": `keys = ["/own", "/etc/gpuckpt/keys"]`, "trust: {}": `keys = ["/own"]`} {
		if _, texts = read("{config: {restore: {keys: [/own]}}, " + trusted + "}"); !strings.Contains(texts["config.toml"], keys) {
			t.Errorf("%s: there is no %s in\n%s", trusted, keys, texts["config.toml"])
		}
	}
	for _, values := range []string{"config:", "config: {restore: }"} { // all lines below it are comments
		node, texts = read(values)
		if len(texts) > 0 || len(node.Spec.Template.Spec.Volumes) != 3 || node.Spec.Template.Metadata.Annotations != nil {
			t.Errorf("%s: %q, %+v", values, texts, node.Spec.Template)
		}
	}
}

// helm lint and kubeconform find nothing, with all that can be switched on, nor kubeconform in what Kustomize takes, the
// examples and those of docs.
func TestChartLint(t *testing.T) {
	check := conform(t)
	for _, values := range []string{
		"{}", withAgent, "{agent: {enabled: true, trust: false, namespaces: [a], repositories: [r.test]}, uninstall: true, podAnnotations: {a: b}}",
		"{config: {driver_root: /d}, trust: {secrets: [s], configMaps: [c]}, encryption: {secrets: [s]}, uninstallHook: false}",
		"{metrics: {podMonitor: true, rules: true, dashboard: true, labels: {release: prometheus}}, networkPolicy: true, podLabels: {a: b}, imagePullSecrets: [{name: s}]}",
		"{metrics: {port: 0}, nodeSelector: null, affinity: {nodeAffinity: {}}, agent: {enabled: true, args: [--plain-http], controller: {nodeSelector: {a: b}, tolerations: [{operator: Exists}]}}}",
		forK3s(t),
	} {
		given, err := chartutil.ReadValues([]byte(values))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range lint.All("../../deploy/chart", given, "gpuckpt", true).Messages {
			if m.Severity >= support.WarningSev {
				t.Errorf("%s: %v", values, m)
			}
		}
		found, err := renderAll(t, values)
		if err != nil || !strings.Contains(found["NOTES.txt"], "kubectl rollout status --namespace gpuckpt daemonset/gpuckpt-node") {
			t.Errorf("%s: the notes are %s, %v", values, found["NOTES.txt"], err)
		}
		delete(found, "NOTES.txt")
		for name, text := range found {
			check(values+": "+name, text)
		}
	}
	example := regexp.MustCompile("(?ms)^```yaml\n(apiVersion:.*?)^```$")
	for _, glob := range []string{"deploy/*.yaml", "deploy/node/*.yaml", "deploy/agent/*.yaml", "docs/*.md"} {
		files, err := filepath.Glob("../../" + glob)
		if err != nil || len(files) < 3 {
			t.Fatal(glob, files, err)
		}
		for _, file := range files {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			texts := []string{string(data)}
			switch name := filepath.Base(file); {
			case filepath.Ext(name) == ".md":
				texts = texts[:0]
				for _, found := range example.FindAllStringSubmatch(string(data), -1) {
					texts = append(texts, found[1])
				}
			case name == "kustomization.yaml", strings.HasPrefix(name, "values"):
				continue
			}
			for _, text := range texts {
				check(file, text)
			}
		}
	}
}

// forK3s returns the values for k3s and RKE2, with the agent.
func forK3s(t *testing.T) string {
	t.Helper()
	values, err := os.ReadFile("../../deploy/values-k3s.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Replace(string(values), "agent:", "agent:\n  enabled: true", 1)
}

// With the values for k3s and RKE2 nothing is left of the place that other nodes have containerd at.
func TestChartForK3s(t *testing.T) {
	for name, text := range render(t, forK3s(t)) {
		for _, other := range []string{" path: /run/containerd", "--containerd=/run/containerd"} {
			if strings.Contains(text, other) {
				t.Errorf("%s has %q:\n%s", name, other, text)
			}
		}
	}
}

// With UPDATE set the test writes deploy/node and deploy/agent anew.
func TestUpdate(t *testing.T) {
	if os.Getenv("UPDATE") == "" {
		return
	}
	node := render(t, "")
	for name, text := range render(t, withAgent) {
		if name == uninstallHook || name == testHook || name == "agent-crds.yaml" { // which Kustomize takes of the chart
			continue
		}
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

// The dashboard and the alerts ask for metrics that there are, by docs/reference.md, and for no other.
func TestChartMonitoring(t *testing.T) {
	page, err := os.ReadFile("../../docs/reference.md")
	if err != nil {
		t.Fatal(err)
	}
	text := render(t, "metrics: {podMonitor: true, rules: true, dashboard: true, labels: {release: prometheus}}")["monitoring.yaml"]
	found := objects(t, text)
	for _, name := range []string{"PodMonitor/gpuckpt-node", "PrometheusRule/gpuckpt-node", "ConfigMap/gpuckpt-dashboard"} {
		if !strings.Contains(found[name], `"release":"prometheus"`) { // an operator that selects by it would pass it over
			t.Errorf("no %s with the label: %s", name, found[name])
		}
	}
	var dashboard struct{ Data map[string]string }
	if err := yaml.Unmarshal([]byte(found["ConfigMap/gpuckpt-dashboard"]), &dashboard); err != nil {
		t.Fatal(err)
	}
	if !json.Valid([]byte(dashboard.Data["gpuckpt.json"])) {
		t.Error("the dashboard is no JSON")
	}
	asked := map[string]bool{}
	for _, metric := range regexp.MustCompile(`gpuckpt_[a-z_]+`).FindAllString(text, -1) {
		for _, suffix := range []string{"_bucket", "_sum", "_count"} {
			metric = strings.TrimSuffix(metric, suffix)
		}
		asked[metric] = true
	}
	for metric := range asked {
		if !strings.Contains(string(page), "`"+metric+"`") {
			t.Errorf("docs/reference.md has no %s", metric)
		}
	}
	if len(asked) < 6 {
		t.Errorf("asked for %v alone", slices.Sorted(maps.Keys(asked)))
	}
}

// The metrics container, which is asked by whoever reaches the node, sees of the node what shims leave, read-only,
// and not containerd's socket: who reaches that is root on the node.
func TestMetricsSeesNoSocket(t *testing.T) {
	var set struct {
		Spec struct {
			Template struct {
				Spec struct {
					Containers []struct {
						Name         string
						VolumeMounts []struct {
							Name, MountPath string
							ReadOnly        bool
						}
					}
					Volumes []struct {
						Name     string
						HostPath struct{ Path string }
					}
				}
			}
		}
	}
	if err := yaml.Unmarshal([]byte(render(t, "")["daemonset.yaml"]), &set); err != nil {
		t.Fatal(err)
	}
	volumes := map[string]string{}
	for _, v := range set.Spec.Template.Spec.Volumes {
		volumes[v.Name] = v.HostPath.Path
	}
	sees := map[string]string{}
	for _, c := range set.Spec.Template.Spec.Containers {
		for _, m := range c.VolumeMounts {
			sees[m.MountPath] = volumes[m.Name]
			if !m.ReadOnly {
				t.Errorf("%s writes to %s", c.Name, m.MountPath)
			}
		}
	}
	const tasks, logs = "/run/containerd/io.containerd.runtime.v2.task", "/var/log/gpuckpt"
	if want := map[string]string{tasks: tasks, logs: logs}; !maps.Equal(sees, want) {
		t.Errorf("it sees %v, want %v", sees, want)
	}
}
