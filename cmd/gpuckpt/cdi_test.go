// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	cdispecs "tags.cncf.io/container-device-interface/specs-go"
)

func TestCDIGenerate(t *testing.T) {
	m := newMachine(t, 2)
	root := t.TempDir()
	dir := filepath.Join(root, "usr/lib64")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "libcuda.so.1"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	out, errs, exit := m.run("gpuckpt", "cdi", "generate", "--driver-root", root)
	if exit != 0 || errs != "" {
		t.Fatalf("exit status %d, printed %q", exit, errs)
	}
	var spec cdispecs.Spec
	if err := json.Unmarshal([]byte(out), &spec); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, d := range spec.Devices {
		names = append(names, d.Name)
	}
	if got, want := strings.Join(names, " "), "0 GPU-5af7c0da-0000-4000-8000-000000000000 1 GPU-5af7c0da-0000-4000-8000-000000000001 all"; got != want {
		t.Errorf("devices %q, want %q", got, want)
	}
	if mounts := spec.ContainerEdits.Mounts; len(mounts) != 1 || mounts[0].ContainerPath != "/usr/lib64/libcuda.so.1" || mounts[0].HostPath != filepath.Join(dir, "libcuda.so.1") {
		t.Errorf("mounts %+v", mounts)
	}

	file := filepath.Join(t.TempDir(), "cdi", "nvidia.json")
	m.prints("", "gpuckpt", "cdi", "generate", "--driver-root", root, "--output", file)
	if data, err := os.ReadFile(file); err != nil || string(data) != out {
		t.Errorf("the file holds %q, error %v; want what was printed", data, err)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"cdi", "generate", "--driver-root", t.TempDir()}, "no libcuda.so.1"},
		{[]string{"cdi", "generate", "--driver-root", root, "--output", filepath.Join(root, "x")}, "must end in .json"},
		{[]string{"cdi", "generate", "more"}, "unknown command"},
		{[]string{"cdi", "list"}, "unknown command"},
	} {
		out, errs, exit := m.run(append([]string{"gpuckpt"}, c.args...)...)
		if exit != 1 || out != "" || !strings.Contains(errs, c.want) {
			t.Errorf("%q: exit status %d, printed %q and %q", c.args, exit, out, errs)
		}
	}
}
