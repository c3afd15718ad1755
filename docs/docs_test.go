// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package docs_test keeps the documents true where a program can tell.
package docs_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/images"
)

// documents are the texts for users, by their paths.
func documents(t *testing.T) map[string]string {
	t.Helper()
	paths, err := filepath.Glob("*.md")
	if err != nil {
		t.Fatal(err)
	}
	texts := make(map[string]string)
	for _, path := range append(paths, "../README.md") {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		texts[path] = string(data)
	}
	return texts
}

// The example of a gpuckpt.json is one.
func TestFormatExample(t *testing.T) {
	block := regexp.MustCompile("(?s)```json\n(.*?)```").FindStringSubmatch(documents(t)["format.md"])
	if block == nil {
		t.Fatal("format.md has no example")
	}
	if _, err := images.ParseMetadata([]byte(block[1])); err != nil {
		t.Error(err)
	}
}

// Links to files lead somewhere.
func TestLinks(t *testing.T) {
	links := regexp.MustCompile(`\]\(([^)#]+)|(?:src|srcset)="([^"]+)"`)
	for path, text := range documents(t) {
		for _, link := range links.FindAllStringSubmatch(text, -1) {
			to := link[1] + link[2]
			if strings.Contains(to, "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(path), to)); err != nil {
				t.Errorf("%s links to %s: %v", path, to, err)
			}
		}
	}
}

// The steps of a checkpoint and of a restore are named as in the code, and
// none is left out.
func TestStepsExplained(t *testing.T) {
	guide := documents(t)["checkpoint.md"]
	names := regexp.MustCompile(`(?:name|back): "([^"]+)"|q\.time\([^"]*"([^"]+)"|Phase\{Name: "([^"]+)"`)
	for _, file := range []string{"../runtime/checkpoint.go", "../runtime/restore.go"} {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		found := names.FindAllStringSubmatch(string(source), -1)
		if len(found) == 0 {
			t.Errorf("%s has no steps", file)
		}
		for _, match := range found {
			if name := match[1] + match[2] + match[3]; !strings.Contains(guide, "`"+name+"`") && !strings.Contains(guide, "**"+name+"**") {
				t.Errorf("checkpoint.md does not explain the step %q of %s", name, file)
			}
		}
	}
}
