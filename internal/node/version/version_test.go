// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package version

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestString(t *testing.T) {
	if got := String(); !strings.Contains(got, ", commit ") || strings.HasPrefix(got, ",") {
		t.Errorf("a build that no release made is %q", got)
	}
	Number, Commit, Date = "1.2.3", "abc", "2026-11-22"
	defer func() { Number, Commit, Date = "", "", "" }()
	if got := String(); !strings.HasPrefix(got, "1.2.3, commit abc of 2026-11-22, linux/") || Short() != "1.2.3" {
		t.Errorf("a release is %q", got)
	}
}

func TestAsked(t *testing.T) {
	for _, c := range []struct {
		args []string
		want bool
	}{
		{[]string{"shim", "--version"}, true},
		{[]string{"shim", "-v"}, true},
		{[]string{"shim"}, false},
		{[]string{"shim", "-namespace", "--version"}, false},
	} {
		if got := Asked(c.args); got != c.want {
			t.Errorf("%q: %v", c.args, got)
		}
	}
}

// A file of the release lies beside the program that a link leads to, or in lib/gpuckpt.
func TestBeside(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(t.TempDir(), "shim")
	put := func(name string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o644)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	if err := os.Symlink(put("bin/shim"), link); err != nil {
		t.Fatal(err)
	}
	if path, err := Beside(link, "file"); err == nil || !strings.Contains(err.Error(), "install gpuckpt anew") {
		t.Errorf("where there is none: %q, %v", path, err)
	}
	for _, name := range []string{"lib/gpuckpt/file", "bin/file"} {
		want := put(name)
		if path, err := Beside(link, "file"); err != nil || path != want {
			t.Errorf("%q, %v; want %s", path, err, want)
		}
	}
}
