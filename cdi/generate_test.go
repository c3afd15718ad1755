// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"
)

// driverRoot is a directory with a driver's files in it.
func driverRoot(t *testing.T, version string) string {
	t.Helper()
	root := t.TempDir()
	dir := filepath.Join(root, "usr/lib64")
	for _, d := range []string{dir, filepath.Join(root, "usr/bin")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"libcuda.so", "libnvidia-ml.so", "libnvidia-ptxjitcompiler.so"} {
		real := name + "." + version
		touch(t, filepath.Join(dir, real))
		if err := os.Symlink(real, filepath.Join(dir, name+".1")); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("libcuda.so.1", filepath.Join(dir, "libcuda.so")); err != nil {
		t.Fatal(err)
	}
	touch(t, filepath.Join(dir, "libnvidia-ml.so.470.1.2")) // of another driver
	touch(t, filepath.Join(dir, "libcudart.so.12"))         // not the driver's
	touch(t, filepath.Join(root, "usr/bin/nvidia-smi"))
	return root
}

func touch(t *testing.T, name string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(name), 0o755); err != nil {
		t.Fatal(err)
	}
}

func TestGenerate(t *testing.T) {
	root := driverRoot(t, "580.159.04")
	node := Node{
		GPUs: []GPU{
			gpuN(3, func(g *GPU) { g.Index = 0 }), // the fastest
			gpuN(0, func(g *GPU) { g.Index = 1 }),
		},
		Partitioned: []GPU{gpuN(1)},
		Driver:      "580.159.04", Root: root,
	}
	spec, err := node.Generate()
	if err != nil {
		t.Fatal(err)
	}
	var devices []string
	for _, d := range spec.Devices {
		var nodes []string
		for _, n := range d.ContainerEdits.DeviceNodes {
			nodes = append(nodes, filepath.Base(n.Path))
		}
		devices = append(devices, d.Name+" "+strings.Join(nodes, "+"))
	}
	want := []string{"0 nvidia0", gpuN(0).UUID + " nvidia0", "2 nvidia3", gpuN(3).UUID + " nvidia3", "all nvidia0+nvidia3"}
	if !slices.Equal(devices, want) {
		t.Errorf("devices %q, want %q", devices, want)
	}
	var mounts []string
	for _, m := range spec.ContainerEdits.Mounts {
		mounts = append(mounts, m.ContainerPath+" "+strings.TrimPrefix(m.HostPath, root))
	}
	want = []string{
		"/usr/lib64/libcuda.so /usr/lib64/libcuda.so.580.159.04",
		"/usr/lib64/libcuda.so.1 /usr/lib64/libcuda.so.580.159.04",
		"/usr/lib64/libcuda.so.580.159.04 /usr/lib64/libcuda.so.580.159.04",
		"/usr/lib64/libnvidia-ml.so.1 /usr/lib64/libnvidia-ml.so.580.159.04",
		"/usr/lib64/libnvidia-ml.so.580.159.04 /usr/lib64/libnvidia-ml.so.580.159.04",
		"/usr/lib64/libnvidia-ptxjitcompiler.so.1 /usr/lib64/libnvidia-ptxjitcompiler.so.580.159.04",
		"/usr/lib64/libnvidia-ptxjitcompiler.so.580.159.04 /usr/lib64/libnvidia-ptxjitcompiler.so.580.159.04",
		"/usr/bin/nvidia-smi /usr/bin/nvidia-smi",
	}
	if !slices.Equal(mounts, want) {
		t.Errorf("mounts\n%s\nwant\n%s", strings.Join(mounts, "\n"), strings.Join(want, "\n"))
	}

	name := filepath.Join(t.TempDir(), "cdi", "nvidia.json")
	if err := WriteFile(name, spec); err != nil {
		t.Fatal(err)
	}
	registry, err := Open(filepath.Dir(name))
	if err != nil {
		t.Fatal(err)
	}
	if got := registry.Devices(); len(got) != 5 || !slices.Contains(got, "nvidia.com/gpu=all") {
		t.Errorf("CDI reads the devices %q", got)
	}
	if got := registry.Files(); len(got) != len(want) {
		t.Errorf("CDI reads the files %v", got)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(name), ".*")); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

func TestGenerateRefused(t *testing.T) {
	root := driverRoot(t, "580.159.04")
	for name, node := range map[string]Node{
		"there is no GPU":     {Driver: "580.159.04", Root: root},
		"NVML is needed":      {GPUs: []GPU{gpuN(0, func(g *GPU) { g.Minor = -1 })}, Driver: "580.159.04", Root: root},
		"of version 590.1":    {GPUs: gpuList(0), Driver: "590.1", Root: root},
		"no such file":        {GPUs: gpuList(0), Driver: "580.159.04", Root: filepath.Join(root, "none")},
		"no libcuda.so.1 of ": {GPUs: gpuList(0), Driver: "580.159.04", Root: t.TempDir()},
	} {
		if _, err := node.Generate(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("error %v, want one that says %q", err, name)
		}
	}
	good, err := Node{GPUs: gpuList(0), Driver: "580.159.04", Root: root}.Generate()
	if err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(filepath.Join(t.TempDir(), "nvidia.toml"), good); err == nil {
		t.Error("a specification that nobody would read was written")
	}
	bad := *good
	bad.Kind = "nvidia"
	if err := WriteFile(filepath.Join(t.TempDir(), "nvidia.json"), &bad); err == nil {
		t.Error("a specification that CDI refuses was written")
	}
}

// specOf decodes a spec.
func specOf(t *testing.T, text string) *specs.Spec {
	t.Helper()
	spec := new(specs.Spec)
	if err := json.Unmarshal([]byte(text), spec); err != nil {
		t.Fatal(err)
	}
	return spec
}

// registryOf is a node with one CDI specification.
func registryOf(t *testing.T, spec cdispecs.Spec) *Registry {
	t.Helper()
	name := filepath.Join(t.TempDir(), "nvidia.json")
	spec.Version, spec.Kind = cdiVersion, Kind
	if err := WriteFile(name, &spec); err != nil {
		t.Fatal(err)
	}
	registry, err := Open(filepath.Dir(name))
	if err != nil {
		t.Fatal(err)
	}
	return registry
}

// device is a CDI device whose node has the numbers of /dev/null.
func device(name, node string) cdispecs.Device {
	return cdispecs.Device{Name: name, ContainerEdits: cdispecs.ContainerEdits{DeviceNodes: []*cdispecs.DeviceNode{{Path: node, HostPath: "/dev/null"}}}}
}

func TestInject(t *testing.T) {
	library := filepath.Join(t.TempDir(), "libcuda.so.580.1.2")
	touch(t, library)
	registry := registryOf(t, cdispecs.Spec{
		Devices: []cdispecs.Device{device("0", "/dev/nvidia0"), device("1", "/dev/nvidia1")},
		ContainerEdits: cdispecs.ContainerEdits{
			Env:    []string{"NVIDIA_VISIBLE_DEVICES=void"},
			Mounts: []*cdispecs.Mount{{HostPath: library, ContainerPath: "/usr/lib/libcuda.so.580.1.2", Options: []string{"ro", "rbind"}}},
		},
	})
	hook := func(device string) string {
		return `{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=` + device + `"]}, "hooks": {
			"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["nvidia-container-runtime-hook", "prestart"]}, {"path": "/usr/bin/another"}],
			"poststop": [{"path": "/usr/bin/last"}]}}`
	}
	spec := specOf(t, hook("1"))
	if done, err := registry.Inject(spec, Toolkit{Variable: true}); err != nil || !done {
		t.Fatalf("injected: %v, error %v", done, err)
	}
	if r := Read(spec); !slices.Equal(r.Minors, []int{1}) || r.hook {
		t.Errorf("it grants %v, hook: %v", r.Minors, r.hook)
	}
	//nolint:staticcheck // that is where the toolkit's hook is
	if left := spec.Hooks.Prestart; len(left) != 1 || left[0].Path != "/usr/bin/another" || len(spec.Hooks.Poststop) != 1 {
		t.Errorf("hooks left: %+v", spec.Hooks)
	}
	if rules := spec.Linux.Resources.Devices; len(rules) != 1 || !rules[0].Allow || *rules[0].Major != 1 || *rules[0].Minor != 3 {
		t.Errorf("cgroup rules: %+v", rules)
	}
	if len(spec.Mounts) != 1 || spec.Mounts[0].Source != library {
		t.Errorf("mounts: %+v", spec.Mounts)
	}

	for name, text := range map[string]string{"no hook": `{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}}`, "a hook for nothing": hook("none")} {
		spec := specOf(t, text)
		before := fmt.Sprintf("%+v", *spec)
		if done, err := registry.Inject(spec, Toolkit{Variable: true}); err != nil || done || fmt.Sprintf("%+v", *spec) != before {
			t.Errorf("%s: injected: %v, error %v", name, done, err)
		}
	}

	spec = specOf(t, hook("0"))
	if done, err := registry.Inject(spec, Toolkit{}); err != nil || done {
		t.Errorf("whom the toolkit does not believe: injected: %v, error %v", done, err)
	}
	spec = specOf(t, hook("7"))
	if _, err := registry.Inject(spec, Toolkit{Variable: true}); !errors.Is(err, ErrNoDevice) || !strings.Contains(err.Error(), "nvidia.com/gpu=7") || !strings.Contains(err.Error(), "nvidia.com/gpu=1") {
		t.Errorf("a GPU that is not there: %v", err)
	}
	if r := Read(spec); !r.hook || len(r.Minors) > 0 {
		t.Errorf("the refused spec was changed: %+v", spec)
	}
	if err := os.Remove(library); err != nil {
		t.Fatal(err)
	}
	spec = specOf(t, hook("0"))
	if _, err := registry.Inject(spec, Toolkit{Variable: true}); !errors.Is(err, ErrNoDevice) || !strings.Contains(err.Error(), library) || len(spec.Mounts) > 0 {
		t.Errorf("a specification of another driver: %v, mounts %v", err, spec.Mounts)
	}
}

// A dump that names files and sockets of the driver gets none of the node's into a container that
// has no GPU.
func TestRebindWithoutGPU(t *testing.T) {
	path := filepath.Join(t.TempDir(), "socket")
	touch(t, path)
	for _, at := range []string{"/x/nvidia-fabricmanager/socket", "/a/libnvidia-ml.so.580.1.2"} {
		spec := specOf(t, `{"mounts": []}`)
		substituted, _, err := Rebind(spec, []string{at}, nil, []File{{Host: path, Container: at}})
		if !errors.Is(err, ErrFiles) || !strings.Contains(err.Error(), "grants no GPU") || len(spec.Mounts) > 0 {
			t.Errorf("%s: %v, error %v, mounts %v", at, substituted, err, spec.Mounts)
		}
	}
}

func TestRebind(t *testing.T) {
	here := t.TempDir()
	lib := func(name string) string {
		path := filepath.Join(here, name)
		touch(t, path)
		return path
	}
	egl, ml, smi, gsp := lib("libEGL_nvidia.so.580.1.2"), lib("libnvidia-ml.so.580.1.2"), lib("nvidia-smi"), lib("gsp.bin")
	mount := func(source, at string) string {
		return fmt.Sprintf(`{"type": "bind", "source": %q, "destination": %q}`, source, at)
	}
	files := []File{{ml, "/usr/lib64/libnvidia-ml.so.580.1.2"}, {smi, "/usr/bin/nvidia-smi"}, {gsp, "/lib/firmware/nvidia/580.1.2/gsp_ga10x.bin"}}
	for _, test := range []struct {
		name    string
		spec    string // its mounts
		mounted []string
		mapped  []string
		want    []Substitution
		stray   []string
		words   []string // of an ErrFiles
	}{
		{name: "all there", spec: mount(egl, "/a/libEGL_nvidia.so.580.1.2"), mounted: []string{"/a/libEGL_nvidia.so.580.1.2"}},
		{name: "another version, of the spec", spec: mount(egl, "/a/libEGL_nvidia.so.580.1.2"), mounted: []string{"/a/libEGL_nvidia.so.560.35.03"}, want: []Substitution{{"/a/libEGL_nvidia.so.560.35.03", egl}}},
		{name: "another version, of the node", mounted: []string{"/a/libnvidia-ml.so.560.35.03"}, want: []Substitution{{"/a/libnvidia-ml.so.560.35.03", ml}}},
		{name: "another directory", mounted: []string{"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.1.2", "/opt/nvidia-smi"},
			want: []Substitution{{"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.1.2", ml}, {"/opt/nvidia-smi", smi}}},
		{name: "firmware", mounted: []string{"/lib/firmware/nvidia/560.35.03/gsp_ga10x.bin"}, want: []Substitution{{"/lib/firmware/nvidia/560.35.03/gsp_ga10x.bin", gsp}}},
		{name: "a source that is not here", spec: mount("/none/libnvidia-ml.so.580.1.2", "/a/libnvidia-ml.so.580.1.2"), mounted: []string{"/a/libnvidia-ml.so.580.1.2"},
			want: []Substitution{{"/a/libnvidia-ml.so.580.1.2", ml}}},
		{name: "nothing like it", mounted: []string{"/a/libnvidia-odd.so.560.35.03", "/a/libGLX_nvidia.so.0"}, words: []string{"/a/libnvidia-odd.so.560.35.03", "/a/libGLX_nvidia.so.0", "gpuckpt cdi generate"}},
		{name: "a source that is not here, nothing like it", spec: mount("/none/libnvidia-odd.so.560.35.03", "/a/libnvidia-odd.so.560.35.03"), words: []string{"/none/libnvidia-odd.so.560.35.03"}},
		{name: "loaded", mounted: []string{"/a/libnvidia-ml.so.560.35.03"}, mapped: []string{"/a/libnvidia-ml.so.560.35.03"}, words: []string{"560.35.03", "580.1.2", "has loaded"}},
		{name: "loaded, of the same driver", mounted: []string{"/a/libnvidia-ml.so.580.1.2"}, mapped: []string{"/a/libnvidia-ml.so.580.1.2"}, want: []Substitution{{"/a/libnvidia-ml.so.580.1.2", ml}}},
		{name: "the user's own", mounted: []string{"/data/models", "/dev/null"}},
		{name: "a node", mounted: []string{"/dev/nvidia0"}, stray: []string{"/dev/nvidia0"}},
		{name: "a node that is mounted now too", spec: mount("/dev/nvidia0", "/dev/nvidia0"), mounted: []string{"/dev/nvidia0"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			spec := specOf(t, `{"mounts": [`+test.spec+`], "linux": {"devices": [{"path": "/dev/nvidia0", "type": "c"}]}}`)
			substituted, stray, err := Rebind(spec, test.mounted, test.mapped, files)
			if len(test.words) > 0 {
				if !errors.Is(err, ErrFiles) {
					t.Fatalf("error %v, want an ErrFiles", err)
				}
				for _, word := range test.words {
					if !strings.Contains(err.Error(), word) {
						t.Errorf("the error does not say %q: %v", word, err)
					}
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(substituted, test.want) || !slices.Equal(stray, test.stray) {
				t.Errorf("substituted %v, stray %v; want %v, %v", substituted, stray, test.want, test.stray)
			}
			for _, r := range substituted {
				if !slices.ContainsFunc(spec.Mounts, func(m specs.Mount) bool { return m.Destination == r.Path && m.Source == r.Host }) {
					t.Errorf("the spec has no mount of %v: %+v", r, spec.Mounts)
				}
			}
			if left := len(spec.Linux.Devices); left != 1-len(stray) {
				t.Errorf("%d devices are left in the spec", left)
			}
		})
	}
}

func TestDriverFiles(t *testing.T) {
	for file, want := range map[string]struct {
		driver  bool
		version string
	}{
		"/usr/lib/libcuda.so.580.159.04":               {true, "580.159.04"},
		"/usr/lib/libcuda.so.1":                        {true, ""},
		"/usr/lib/libEGL_nvidia.so.560.35.03":          {true, "560.35.03"},
		"/usr/lib/libGLX_nvidia.so.0":                  {true, ""},
		"/lib/firmware/nvidia/580.1/gsp_ga10x.bin":     {true, "580.1"},
		"/usr/bin/nvidia-smi":                          {true, ""},
		"/run/nvidia-persistenced/socket":              {true, ""},
		"/usr/lib/libcudart.so.12":                     {false, ""},
		"/usr/lib/libc.so.6":                           {false, ""},
		"/etc/resolv.conf":                             {false, ""},
		"/usr/lib/nvidia/wine/nvngx.dll":               {false, ""},
		"/usr/share/glvnd/egl_vendor.d/10_nvidia.json": {true, ""},
	} {
		if IsDriverFile(file) != want.driver || DriverVersion(file) != want.version {
			t.Errorf("%s: driver's %v, version %q; want %+v", file, IsDriverFile(file), DriverVersion(file), want)
		}
	}
}
