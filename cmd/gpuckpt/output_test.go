// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
)

// With --json an error is JSON as well, also one of a wrong call.
func TestErrorsAsJSON(t *testing.T) {
	m := newMachine(t, 1)
	for _, c := range []struct {
		args       []string
		says, help string
	}{
		{[]string{"gpuckpt", "ls", "--json", "--address", "/nowhere/c.sock"}, "reach containerd at /nowhere/c.sock", ""},
		{[]string{"gpuckpt", "suspend", "--json"}, "accepts 1 arg", "gpuckpt suspend --help"},
		{[]string{"gpuckpt", "ps", "--json", "--what"}, "unknown flag: --what", "gpuckpt ps --help"},
	} {
		out, errs, exit := m.run(c.args...)
		var f failure
		if err := json.Unmarshal([]byte(errs), &f); err != nil || exit != 1 || out != "" {
			t.Errorf("%q: %v in %q, exit status %d, output %q", c.args, err, errs, exit, out)
		}
		if !strings.Contains(f.Error, c.says) || f.Help != c.help {
			t.Errorf("%q: %+v", c.args, f)
		}
	}
}

// Every command has a man page.
func TestManPages(t *testing.T) {
	m, dir := newMachine(t, 1), t.TempDir()
	m.prints("", "gpuckpt", "man", dir)
	pages, err := os.ReadDir(dir)
	if err != nil || len(pages) < 20 {
		t.Fatalf("%v, %v", pages, err)
	}
	page, err := os.ReadFile(dir + "/gpuckpt-image-push.1")
	if err != nil || !strings.Contains(string(page), "--parallel") && !strings.Contains(string(page), `\-\-parallel`) {
		t.Errorf("%v, %s", err, page)
	}
}
