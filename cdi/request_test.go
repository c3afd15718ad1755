// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"encoding/json"
	"path"
	"slices"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// Every way in which people ask for GPUs, as it stands in the spec.
func TestRead(t *testing.T) {
	const (
		null    = `"type": "bind", "source": "/dev/null"`
		devices = `"linux": {"devices": [{"path": "/dev/nvidiactl", "type": "c"}, {"path": "/dev/nvidia1", "type": "c"}, {"path": "/dev/nvidia0", "type": "c"}, {"path": "/dev/nvidia-caps/nvidia-cap2", "type": "c"}]}`
		runtime = `"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["nvidia-container-runtime-hook", "prestart"]}]`
	)
	for _, test := range []struct {
		name, spec string
		minors     []int
		says       string
		hooks      []string
		mig, mps   string
		all        bool
	}{
		{name: "nothing", spec: `{}`, says: "no GPU"},
		{name: "nodes", spec: `{` + devices + `}`, minors: []int{0, 1}, says: "linux.devices: /dev/nvidia1, /dev/nvidia0"},
		{name: "CDI by CRI", spec: `{"annotations": {"cdi.k8s.io/plugin_x": "nvidia.com/gpu=0,nvidia.com/gpu=1"}, ` + devices + `}`, minors: []int{0, 1},
			says: "linux.devices: /dev/nvidia1, /dev/nvidia0; annotation cdi.k8s.io/plugin_x: nvidia.com/gpu=0, nvidia.com/gpu=1"},
		{name: "an annotation alone grants nothing", spec: `{"annotations": {"cdi.k8s.io/x": "nvidia.com/gpu=0"}}`, says: "annotation cdi.k8s.io/x: nvidia.com/gpu=0"},
		{name: "the variable alone grants nothing", spec: `{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}}`, says: "NVIDIA_VISIBLE_DEVICES: all"},
		{name: "void", spec: `{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=void"]}}`, says: "no GPU"},
		{name: "none", spec: `{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=none"]}}`, says: "no GPU"},
		{name: "the toolkit's hook, all", spec: `{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}, "hooks": {` + runtime + `}}`, hooks: []string{"all"},
			says: "NVIDIA_VISIBLE_DEVICES: all"},
		{name: "the toolkit's hook, indices and UUID", spec: `{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=0, GPU-5af7c0da-0000-4000-8000-000000000001"]}, "hooks": {` + runtime + `}}`,
			hooks: []string{"0", "GPU-5af7c0da-0000-4000-8000-000000000001"},
			says:  "NVIDIA_VISIBLE_DEVICES: 0, GPU-5af7c0da-0000-4000-8000-000000000001"},
		{name: "the toolkit's hook for nothing", spec: `{"hooks": {` + runtime + `}}`, says: "no GPU"},
		{name: "a device plugin's mounts", spec: `{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=/var/run/nvidia-container-devices"]}, "hooks": {` + runtime + `},
			"mounts": [{"destination": "/var/run/nvidia-container-devices/GPU-5af7c0da-0000-4000-8000-000000000001", ` + null + `}]}`,
			hooks: []string{"GPU-5af7c0da-0000-4000-8000-000000000001"},
			says:  "mounts in /var/run/nvidia-container-devices: GPU-5af7c0da-0000-4000-8000-000000000001; NVIDIA_VISIBLE_DEVICES: /var/run/nvidia-container-devices"},
		{name: "a device plugin's CDI mounts", spec: `{"hooks": {` + runtime + `},
			"mounts": [{"destination": "/var/run/nvidia-container-devices/cdi/nvidia.com/gpu/0", ` + null + `}]}`,
			hooks: []string{"nvidia.com/gpu=0"}, says: "mounts in /var/run/nvidia-container-devices: nvidia.com/gpu=0"},
		{name: "nerdctl --gpus", spec: `{"hooks": {"createRuntime": [{"path": "/usr/bin/containerd",
			"args": ["containerd", "oci-hook", "--", "/usr/bin/nvidia-container-cli", "--load-kmods", "configure", "--device=1,0", "--utility", "--pid={{pid}}", "{{rootfs}}"]}]}}`,
			hooks: []string{"1", "0"}, says: "hook /usr/bin/containerd: 1, 0"},
		{name: "another hook", spec: `{"hooks": {"createRuntime": [{"path": "/usr/bin/containerd", "args": ["containerd", "oci-hook", "--", "other", "--device=1"]}]}}`, says: "no GPU"},
		{name: "a node by a mount", spec: `{"mounts": [{"destination": "/dev/nvidia3", "type": "bind", "source": "/dev/nvidia3"}]}`, minors: []int{3}, says: "mounts: /dev/nvidia3"},
		{name: "the host's /dev", spec: `{"mounts": [{"destination": "/dev", "type": "bind", "source": "/dev"}]}`, all: true, says: "mounts: /dev"},
		{name: "a /dev of its own", spec: `{"mounts": [{"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}]}`, says: "no GPU"},
		{name: "MIG by UUID", spec: `{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=MIG-1"]}}`, mig: "NVIDIA_VISIBLE_DEVICES MIG-1", says: "NVIDIA_VISIBLE_DEVICES: MIG-1"},
		{name: "MIG by index", spec: `{"annotations": {"cdi.k8s.io/x": "nvidia.com/gpu=0:1"}}`, mig: "annotation cdi.k8s.io/x nvidia.com/gpu=0:1", says: "annotation cdi.k8s.io/x: nvidia.com/gpu=0:1"},
		{name: "MIG by its nodes", spec: `{"linux": {"devices": [{"path": "/dev/nvidia-caps/nvidia-cap21", "type": "c"}]}}`, mig: "linux.devices /dev/nvidia-caps/nvidia-cap21", says: "no GPU"},
		{name: "MPS", spec: `{"process": {"env": ["CUDA_MPS_PIPE_DIRECTORY=/mps/nvidia.com/gpu/pipe"]}}`, mps: "CUDA_MPS_PIPE_DIRECTORY=/mps/nvidia.com/gpu/pipe", says: "no GPU"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var spec specs.Spec
			if err := json.Unmarshal([]byte(test.spec), &spec); err != nil {
				t.Fatal(err)
			}
			r := Read(&spec)
			if !slices.Equal(r.Minors, test.minors) || r.AllNodes != test.all {
				t.Errorf("grants %v, all: %v; want %v, all: %v", r.Minors, r.AllNodes, test.minors, test.all)
			}
			if got := r.String(); got != test.says {
				t.Errorf("says %q, want %q", got, test.says)
			}
			if got := (Toolkit{Variable: true, Mounts: true}).adds(r); !slices.Equal(got, test.hooks) {
				t.Errorf("the toolkit would give %q, want %q", got, test.hooks)
			}
			if r.MIG != test.mig || r.MPS != test.mps {
				t.Errorf("MIG %q, MPS %q; want %q, %q", r.MIG, r.MPS, test.mig, test.mps)
			}
		})
	}
}

// Whatever stands in a container's environment and annotations, nothing is
// granted by it.
func FuzzRead(f *testing.F) {
	f.Add("MIG-1,0:1", "nvidia.com/gpu=0", "cdi/nvidia.com/gpu/0")
	f.Add(",,", "=", "/")
	f.Fuzz(func(t *testing.T, variable, annotation, mount string) {
		r := Read(&specs.Spec{
			Process:     &specs.Process{Env: []string{visibleDevices + "=" + variable}},
			Annotations: map[string]string{"cdi.k8s.io/x": annotation},
			Mounts:      []specs.Mount{{Destination: deviceMounts + "/" + mount, Type: "bind", Source: "/dev/null"}},
		})
		at := path.Clean(deviceMounts + "/" + mount) // a mount of a node does grant it
		if (len(r.Minors) > 0 || r.AllNodes) && at != "/dev" && !IsNode(at) {
			t.Errorf("granted: %+v", r)
		}
	})
}

// Whom the toolkit believes, it alone decides.
func TestToolkit(t *testing.T) {
	variable := Request{variable: []string{"all"}}
	hook := Request{variable: []string{"all"}, hook: true}
	privileged := Request{variable: []string{"all"}, hook: true, privileged: true}
	mounted := Request{variable: []string{deviceMounts}, mounted: []string{"1"}, hook: true}
	arguments := Request{variable: []string{"all"}, arguments: []string{"1"}}
	for _, test := range []struct {
		toolkit Toolkit
		request Request
		want    []string
	}{
		{Toolkit{}, variable, nil},
		{Toolkit{Variable: true}, variable, nil},
		{Toolkit{Variable: true, Runtime: true}, variable, []string{"all"}},
		{Toolkit{Runtime: true}, variable, nil},
		{Toolkit{Variable: true}, hook, []string{"all"}},
		{Toolkit{}, hook, nil},
		{Toolkit{}, privileged, []string{"all"}},
		{Toolkit{Variable: true}, mounted, nil},
		{Toolkit{Mounts: true}, mounted, []string{"1"}},
		{Toolkit{Mounts: true, Variable: true}, hook, []string{"all"}},
		{Toolkit{}, arguments, []string{"1"}},
		{Toolkit{Variable: true}, arguments, []string{"1"}},
	} {
		if got := test.toolkit.adds(test.request); !slices.Equal(got, test.want) {
			t.Errorf("%+v gives %q to %+v, want %q", test.toolkit, got, test.request, test.want)
		}
	}
}

func TestGrants(t *testing.T) {
	r := Request{Minors: []int{1}}
	if r.Grants(GPU{Minor: 0}) || !r.Grants(GPU{Minor: 1}) || !(Request{AllNodes: true}).Grants(GPU{Minor: 5}) {
		t.Error("a GPU is granted if its node is")
	}
}

func TestNodes(t *testing.T) {
	for path, want := range map[string]struct {
		node, dynamic bool
		minor         int // -1: none
	}{
		"/dev/nvidia0":                                {true, false, 0},
		"/dev/../dev/nvidia12":                        {true, false, 12},
		"/dev/nvidiactl":                              {true, false, -1},
		"/dev/nvidia-modeset":                         {true, false, -1},
		"/dev/nvidia-uvm":                             {true, true, -1},
		"/dev/nvidia-uvm-tools":                       {true, true, -1},
		"/dev/nvidia-caps/nvidia-cap1":                {true, true, -1},
		"/dev/nvidia-caps-imex-channels/channel0":     {true, true, -1},
		"/dev/nvidia":                                 {false, false, -1},
		"/dev/nvidia0/x":                              {false, false, -1},
		"/dev/nvidia99999999999999999999999999999999": {true, false, -1},
		"/dev/null":                                   {false, false, -1},
		"/tmp/dev/nvidia0":                            {false, false, -1},
	} {
		minor, ok := MinorOf(path)
		if IsNode(path) != want.node || HasDynamicMajor(path) != want.dynamic || ok != (want.minor >= 0) || ok && minor != want.minor {
			t.Errorf("%s: node %v, dynamic %v, minor %d %v; want %+v", path, IsNode(path), HasDynamicMajor(path), minor, ok, want)
		}
	}
}

func TestReplace(t *testing.T) {
	r := Request{Minors: []int{0, 1, 5}}
	before := r
	r.Replace([]int{1, 7}, []int{3, 5})
	if !slices.Equal(r.Minors, []int{0, 3, 5}) || !slices.Equal(before.Minors, []int{0, 1, 5}) {
		t.Errorf("got %v, before %v", r.Minors, before.Minors)
	}
}
