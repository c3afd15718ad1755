// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
)

// docs/config.example.toml names every setting with its default, and what is
// commented out in it is valid. docs/reference.md is made of the settings.
func TestExampleConfig(t *testing.T) {
	example, err := os.ReadFile("../../../docs/config.example.toml")
	if err != nil {
		t.Fatal(err)
	}
	got, err := parse(example)
	if err != nil {
		t.Fatal(err)
	}
	if len(got.CRIU.Options) == 0 {
		got.CRIU.Options = nil // the section is there, and empty
	}
	if want := Default(); !reflect.DeepEqual(got, want) {
		t.Errorf("config.example.toml sets\n%+v\nwhile the defaults are\n%+v", got, want)
	}
	for _, key := range settings(reflect.TypeFor[Node]()) {
		if !regexp.MustCompile(`(?m)^(\[(.*\.)?` + key + `\]|` + key + ` =)`).Match(example) {
			t.Errorf("config.example.toml has no setting %s", key)
		}
	}
	// "#name = value" is a setting, "# Text" is not.
	whole, err := parse(regexp.MustCompile(`(?m)^#([a-z])`).ReplaceAll(example, []byte("$1")))
	if err != nil {
		t.Fatalf("config.example.toml with every setting switched on: %v", err)
	}
	if len(whole.CRIU.Options) == 0 {
		t.Error("config.example.toml shows no option of CRIU")
	}
}

// TestAnnotationsExplained keeps the guide's list of CRIU's options complete. docs/reference.md is made of
// the annotations.
func TestAnnotationsExplained(t *testing.T) {
	guide, err := os.ReadFile("../../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range criuAnnotations {
		if !strings.Contains(string(guide), "`"+name+"`") {
			t.Errorf("configuration.md does not explain the option %s", name)
		}
	}
}

// settings lists the names of a configuration's settings and sections.
func settings(t reflect.Type) []string {
	var keys []string
	for field := range t.Fields() {
		keys = append(keys, field.Tag.Get("toml"))
		if field.Type.Kind() == reflect.Struct {
			keys = append(keys, settings(field.Type)...)
		}
	}
	return keys
}
