// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/yannh/kubeconform/pkg/validator"
	"sigs.k8s.io/yaml"
)

// strict has a schema refuse fields that it does not name.
func strict(schema map[string]any) {
	if _, ok := schema["properties"].(map[string]any); ok && schema["additionalProperties"] == nil {
		schema["additionalProperties"] = false
	}
	if schema["format"] == "int-or-string" {
		schema["type"] = []string{"integer", "string"}
	}
	for _, inner := range schema {
		if inner, ok := inner.(map[string]any); ok {
			strict(inner)
		}
	}
}

// schemas writes the schemas of the kinds of the tests' API server and of the chart's own, as kubeconform finds them at
// what it returns.
func schemas(t *testing.T) string {
	t.Helper()
	read := func(data []byte, err error, into any) {
		t.Helper()
		if err == nil {
			err = yaml.Unmarshal(data, into)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	var module struct{ Dir string }
	data, err := exec.CommandContext(t.Context(), "go", "-C", "../kubernetes", "mod", "download", "-json", "k8s.io/kubernetes").Output()
	read(data, err, &module)
	var all struct {
		Definitions map[string]map[string]any `json:"definitions"`
	}
	data, err = os.ReadFile(filepath.Join(module.Dir, "api/openapi-spec/swagger.json"))
	read(data, err, &all)
	all.Definitions["io.k8s.apimachinery.pkg.api.resource.Quantity"]["type"] = []string{"number", "string"}
	const kinds = "x-kubernetes-group-version-kind"
	for name, text := range objects(t, render(t, withAgent)["agent-crds.yaml"]) {
		var crd struct {
			Spec struct {
				Group    string
				Names    struct{ Kind string }
				Versions []struct {
					Name   string
					Schema struct{ OpenAPIV3Schema map[string]any }
				}
			}
		}
		read([]byte(text), nil, &crd)
		v := crd.Spec.Versions[0]
		all.Definitions[name] = v.Schema.OpenAPIV3Schema
		all.Definitions[name][kinds] = []any{map[string]any{"group": crd.Spec.Group, "version": v.Name, "kind": crd.Spec.Names.Kind}}
		maps.Copy(v.Schema.OpenAPIV3Schema["properties"].(map[string]any), map[string]any{
			"apiVersion": map[string]any{}, "kind": map[string]any{}, "metadata": map[string]any{"$ref": "#/definitions/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"},
		})
	}
	dir := t.TempDir()
	write := func(name string, schema any) {
		data, err := json.Marshal(schema)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, schema := range all.Definitions {
		strict(schema)
		var of []struct{ Group, Version, Kind string }
		data, err := json.Marshal(schema[kinds])
		read(data, err, &of)
		for _, k := range of {
			write(strings.ToLower(k.Kind)+"."+cmp.Or(k.Group, k.Version)+"."+k.Version+".json", map[string]string{"$ref": "all.json#/definitions/" + strings.ReplaceAll(name, "/", "~1")})
		}
	}
	write("all.json", all)
	return filepath.Join(dir, "{{.ResourceKind}}.{{.Group}}.{{.ResourceAPIVersion}}.json")
}

// conform returns what has kubeconform look at objects. Those of the Prometheus Operator are compared with its types.
func conform(t *testing.T) func(name, text string) {
	t.Helper()
	operators := map[string]any{"PodMonitor": &monitoring.PodMonitor{}, "PrometheusRule": &monitoring.PrometheusRule{}}
	v, err := validator.New([]string{schemas(t)}, validator.Opts{Strict: true, IgnoreMissingSchemas: true})
	if err != nil {
		t.Fatal(err)
	}
	return func(name, text string) {
		t.Helper()
		for _, r := range v.Validate(name, io.NopCloser(strings.NewReader(text))) {
			of, _ := r.Resource.Signature()
			if into := operators[of.Kind]; into != nil {
				if r.Err = yaml.UnmarshalStrict(r.Resource.Bytes, into); r.Err == nil {
					continue
				}
			}
			if r.Status != validator.Valid && r.Status != validator.Empty { // one that is Skipped has no schema, or a wrong one
				t.Errorf("%s: %s %s: %v", name, of.Kind, of.Name, r.Err)
			}
		}
	}
}
