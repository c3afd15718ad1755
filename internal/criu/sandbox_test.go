// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

func TestSandbox(t *testing.T) {
	dir, plugins := filepath.Join(t.TempDir(), "sandbox"), t.TempDir()
	if err := os.Symlink("/opt/criu/some.so", filepath.Join(plugins, "some.so")); err != nil {
		t.Fatal(err)
	}
	spec := &specs.Spec{
		Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{Bounding: []string{"CAP_SYSLOG"}}},
		Linux:   &specs.Linux{Devices: []specs.LinuxDevice{{Path: "/dev/null"}}},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/data", Type: "bind", Source: "/srv/data/", Options: []string{"rbind", "ro"}},
			{Destination: "/sub", Type: "none", Source: "/srv/data/sub", Options: []string{"bind"}},
			{Destination: "/data-2", Type: "bind", Source: "/srv/data-2"},
			{Destination: "/certificates", Type: "bind", Source: "/usr/share/ca-certificates"},
		},
	}
	lines, err := Sandbox{Spec: spec, Work: "/work", Programs: "/bundle/criu-path", Root: "/run/criu-root"}.lines(dir, plugins)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"sandbox\t" + dir, "work\t/work", "proc", "mounts", "bind\tro\t" + plugins, "bind\trw\t/run/criu-root", "bind\trw\t/bundle/criu-path", "bind\tro\t/opt/criu/some.so",
		"bind\tro\t/usr", "bind\trw\t/dev/null", "bind\tro\t/srv/data", "bind\trw\t/srv/data-2",
	} {
		if !slices.Contains(lines, want) {
			t.Errorf("no line %q in %q", want, lines)
		}
	}
	for _, l := range lines {
		if strings.HasSuffix(l, "\t/srv/data/sub") || strings.HasSuffix(l, "ca-certificates") || strings.HasSuffix(l, "\t/") || strings.Contains(l, "\t/etc\t") {
			t.Errorf("line %q", l)
		}
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		t.Errorf("its root: %v, %v", info, err)
	}
	set := Sandbox{Spec: spec}.capabilities()
	if set&(1<<unix.CAP_SYS_ADMIN) == 0 || set&(1<<unix.CAP_SYSLOG) == 0 || set&(1<<unix.CAP_SYS_MODULE|1<<unix.CAP_SYS_RAWIO|1<<unix.CAP_SYS_BOOT|1<<unix.CAP_BPF) != 0 {
		t.Errorf("it keeps %#x", set)
	}
	// With it /proc/PID/root leads to the host.
	if holds := (Sandbox{Spec: spec, Traces: true}).capabilities(); set&(1<<unix.CAP_SYS_PTRACE) != 0 || holds != set|1<<unix.CAP_SYS_PTRACE {
		t.Errorf("it keeps %#x, and %#x to hold threads", set, holds)
	}
	if to, err := os.Readlink("/lib"); err == nil { // on most systems
		for source, line := range map[string]string{"/lib": "bind\tro\t/lib", "/lib/modules": "link\t/lib\t" + to} {
			spec.Mounts[1].Source = source
			lines, err := Sandbox{Spec: spec, Programs: "/p", Root: "/x"}.lines(dir, plugins)
			if lines = slices.DeleteFunc(lines, func(l string) bool { return !strings.Contains(l, "\t/lib\t") && !strings.Contains(l+"/", "\t/lib/") }); err != nil || !slices.Equal(lines, []string{line}) {
				t.Errorf("with %s mounted: %q, %v", source, lines, err)
			}
		}
	}
	for _, writes := range []string{"/tmp", "/proc"} {
		spec.Mounts[1].Source = writes
		if lines, err := (Sandbox{Spec: spec, Programs: "/p", Root: "/x"}).lines(dir, plugins); err != nil || !slices.Contains(lines, "bind\trw\t"+writes) || slices.Index(lines, "bind\trw\t"+writes) > slices.Index(lines, "writable\t/proc/sys/net") {
			t.Errorf("with %s mounted read-only: %q, %v", writes, lines, err)
		}
	}
	spec.Mounts[1].Source = "/srv/a\nbind\trw\t/etc"
	if lines, err := (Sandbox{Spec: spec, Programs: "/p", Root: "/x"}).lines(dir, plugins); err == nil {
		t.Errorf("a newline in a path makes %q", lines)
	}
	// A container that has all of the host.
	spec.Mounts[1].Source = "/"
	if lines, err := (Sandbox{Spec: spec, Programs: "/p", Root: "/x"}).lines(dir, plugins); err != nil || len(lines) != 2 || !strings.HasPrefix(lines[0], "caps\t") || lines[1] != "mounts" {
		t.Errorf("with / mounted: %q, %v", lines, err)
	}
	// LD_PRELOAD could not name this library.
	if lines, err := (Sandbox{Spec: spec, Programs: "/p", Root: "/x"}).lines(dir, "/a b/plugins"); err == nil {
		t.Errorf("plugins at a path with a space: %q", lines)
	}
	// One that may mount what it likes.
	spec.Process.Capabilities.Bounding = []string{"CAP_SYS_ADMIN"}
	if lines, err := (Sandbox{Spec: spec, Programs: "/p", Root: "/x"}).lines(dir, "/a b/plugins"); err != nil || slices.Contains(lines, "mounts") {
		t.Errorf("with CAP_SYS_ADMIN: %q, %v", lines, err)
	}
}
