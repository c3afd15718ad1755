// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cudahelper

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/cdi"
)

const (
	uuidA = "GPU-ac739775-045d-4094-5e9b-4ca9cf57ebec"
	uuidB = "GPU-50bfc93b-52b4-cb57-7e91-b4095c5b2f72"
)

func TestVisibleGPUs(t *testing.T) {
	proc := t.TempDir()
	for minor, uuid := range []string{uuidA, uuidB} {
		dir := filepath.Join(proc, fmt.Sprintf("0000:0%d:00.0", minor+1))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		text := fmt.Sprintf("Model: \t\t NVIDIA H200\nGPU UUID: \t %s\nDevice Minor: \t %d\n", uuid, minor)
		if err := os.WriteFile(filepath.Join(dir, "information"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	node := func(paths ...string) *specs.Linux {
		l := new(specs.Linux)
		for _, path := range paths {
			l.Devices = append(l.Devices, specs.LinuxDevice{Path: path, Type: "c"})
		}
		return l
	}
	bind := func(path string) []specs.Mount {
		return []specs.Mount{{Type: "bind", Source: path, Destination: path}}
	}
	hook := &specs.Hooks{CreateRuntime: []specs.Hook{{Path: "/usr/bin/nvidia-container-runtime-hook", Args: []string{"nvidia-container-runtime-hook", "prestart"}}}}
	for _, test := range []struct {
		name string
		spec specs.Spec
		want []string
	}{
		{"a node", specs.Spec{Linux: node("/dev/nvidia1", "/dev/nvidiactl")}, []string{uuidB}},
		{"two", specs.Spec{Linux: node("/dev/nvidia1", "/dev/nvidia0")}, []string{uuidA, uuidB}},
		{"a mount", specs.Spec{Mounts: bind("/dev/nvidia0")}, []string{uuidA}},
		{"one that is not known", specs.Spec{Linux: node("/dev/nvidia0", "/dev/nvidia4")}, nil},
		{"the host's /dev", specs.Spec{Linux: node("/dev/nvidia0"), Mounts: bind("/dev")}, nil},
		{"a hook beside", specs.Spec{Linux: node("/dev/nvidia0"), Hooks: hook}, nil},
		{"an instance", specs.Spec{Linux: node("/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap30")}, nil},
		{"nothing", specs.Spec{}, nil},
	} {
		if got := visibleGPUs(proc, cdi.Read(&test.spec)); !slices.Equal(got, test.want) {
			t.Errorf("%s: %v, want %v", test.name, got, test.want)
		}
	}
	request := cdi.Read(&specs.Spec{Linux: node("/dev/nvidia0")})
	if got := visibleGPUs(filepath.Join(proc, "none"), request); got != nil {
		t.Errorf("without the directory: %v", got)
	}
}
