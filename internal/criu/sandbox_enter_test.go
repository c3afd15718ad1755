// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// enterSandbox builds the program that enters the sandbox.
func enterSandbox(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root may make a mount namespace")
	}
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("no C compiler")
	}
	enter := filepath.Join(t.TempDir(), "enter")
	if out, err := exec.Command("gcc", "-Wall", "-Werror", "-o", enter, "testdata/enter.c", "plugin/sandbox.c", "plugin/mounts.c").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return enter
}

// A container may have the host's /proc: the settings in it are read-only all the same.
func TestSandboxKeepsSettings(t *testing.T) {
	enter := enterSandbox(t)
	for _, line := range []string{"bind\trw\t/dev/null", "bind\trw\t/proc"} {
		out, err := exec.Command(enter, "-/proc/sys/kernel/core_pattern", "sandbox\t"+t.TempDir(), "work\t"+t.TempDir(), "proc", "bind\tro\t/usr", line).CombinedOutput()
		if err != nil {
			t.Errorf("%s: error %v, output %q", line, err, out)
		}
	}
}

// A container may have the host's /run, writable or not: its mode stays as it is.
func TestSandboxLeavesTheHostsRun(t *testing.T) {
	enter := enterSandbox(t)
	before, err := os.Stat("/run")
	if err != nil {
		t.Fatal(err)
	}
	for _, access := range []string{"rw", "ro"} {
		out, err := exec.Command(enter, "sandbox\t"+t.TempDir(), "work\t"+t.TempDir(), "bind\tro\t/usr", "bind\t"+access+"\t/run").CombinedOutput()
		if err != nil {
			t.Errorf("%s: error %v, output %q", access, err, out)
		}
	}
	after, err := os.Stat("/run")
	if err != nil || after.Mode() != before.Mode() {
		t.Errorf("the mode was %v and is %v, %v", before.Mode(), after.Mode(), errors.Join(err, os.Chmod("/run", before.Mode())))
	}
}

// A device node of the host that goes away after the shim has named it is not in the sandbox, and
// the restore goes on. Anything else that goes away is an error: what CRIU needs is not there.
func TestSandboxWithoutANode(t *testing.T) {
	enter := enterSandbox(t)
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
