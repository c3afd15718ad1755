// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// A device node of the host that goes away after the shim has named it is not in the sandbox, and
// the restore goes on. Anything else that goes away is an error: what CRIU needs is not there.
func TestSandboxWithoutANode(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root may make a mount namespace")
	}
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("no C compiler")
	}
	dir := t.TempDir()
	enter := filepath.Join(dir, "enter")
	if out, err := exec.Command("gcc", "-Wall", "-Werror", "-o", enter, "testdata/enter.c", "plugin/sandbox.c", "plugin/mounts.c").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	const node, file = "/dev/gpuckpt-test-node-that-went-away", "/srv/gpuckpt-test-file-that-went-away"
	for _, test := range []struct {
		name, line, says string
	}{
		{name: "all there", line: "bind\trw\t/dev/null"},
		{name: "a node", line: "bind\trw\t" + node},
		{"a file", "bind\tro\t" + file, "show " + file + ": No such file or directory"},
	} {
		t.Run(test.name, func(t *testing.T) {
			root, work := t.TempDir(), t.TempDir()
			out, err := exec.Command(enter, node, file, enter, "sandbox\t"+root, "work\t"+work, "bind\tro\t/usr", test.line).CombinedOutput()
			if test.says == "" && err != nil || test.says != "" && (err == nil || !strings.Contains(string(out), test.says)) {
				t.Errorf("error %v, output %q; want %q", err, out, test.says)
			}
		})
	}
}
