// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// fake makes a machine of the files given, by path.
func fake(t *testing.T, files map[string]string) *Node {
	t.Helper()
	n := &Node{Root: t.TempDir(), Env: []string{"PATH="}}
	for path, text := range files {
		put(t, n.path(path), text, 0o644)
	}
	return n
}

func put(t *testing.T, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

// program puts a shell script into a directory of its own, which it adds to the
// machine's $PATH.
func (n *Node) program(t *testing.T, name, script string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	put(t, path, "#!/bin/sh\n"+script, 0o755)
	n.Env = []string{"PATH=" + filepath.Dir(path) + ":" + n.env("PATH")}
	return path
}

// want is what a test wants of one check: its status and words.
type want struct {
	area, name string
	status     Status
	words      []string
}

// compare wants these checks among others, and no others but good ones.
func compare(t *testing.T, checks []Check, wants []want) {
	t.Helper()
	left := make(map[string]Check)
	for _, c := range checks {
		if (c.Status == OK) != (c.Problem == "" && c.Fix == "") {
			t.Errorf("%s %s is %s, with problem %q and fix %q", c.Area, c.Name, c.Status, c.Problem, c.Fix)
		}
		if strings.HasPrefix(c.Found, ":") {
			t.Errorf("%s %s begins with nothing: %q", c.Area, c.Name, c.Found)
		}
		if _, twice := left[c.Area+" "+c.Name]; twice {
			t.Errorf("%s %s is there twice", c.Area, c.Name)
		}
		left[c.Area+" "+c.Name] = c
	}
	for _, w := range wants {
		c, there := left[w.area+" "+w.name]
		if !there {
			t.Errorf("no check %s %s in %+v", w.area, w.name, checks)
			continue
		}
		delete(left, w.area+" "+w.name)
		if c.Status != w.status {
			t.Errorf("%s %s is %s, want %s: %+v", w.area, w.name, c.Status, w.status, c)
		}
		for _, word := range w.words {
			if !strings.Contains(c.Found+"\n"+c.Problem+"\n"+c.Fix, word) {
				t.Errorf("%s %s does not say %q: %+v", w.area, w.name, word, c)
			}
		}
	}
	for name, c := range left {
		if c.Status != OK {
			t.Errorf("not expected: %s: %+v", name, c)
		}
	}
}
