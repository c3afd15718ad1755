// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package version

import (
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
