// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"os/exec"
	"strings"
	"testing"
)

// See the package comment.
func TestNothingIsImportedThatLoadsMoreLibraries(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "../../cmd/gpuckpt-cuda-helper").Output()
	if err != nil {
		t.Fatal(err)
	}
	for pkg := range strings.Lines(string(out)) {
		if pkg = strings.TrimSpace(pkg); pkg == "net" || pkg == "os/user" || pkg == "plugin" {
			t.Errorf("the helper imports %s", pkg)
		}
	}
}
