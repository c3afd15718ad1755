// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpus

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// amended changes a spec by a function.
func amended(change func(*specs.Spec)) []oci.SpecOpts {
	return []oci.SpecOpts{func(_ context.Context, _ oci.Client, _ *containers.Container, s *oci.Spec) error {
		change(s)
		return nil
	}}
}

// inside is a path in a container, seen from outside.
func inside(t *testing.T, k *harness.Container, path string) string {
	t.Helper()
	pid, err := k.Pid(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(fmt.Sprintf("/proc/%d/root", pid), path)
}

// file makes a file of the host with a text.
func file(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func bindOf(source, destination string) specs.Mount {
	return specs.Mount{Type: "bind", Source: source, Destination: destination, Options: []string{"rbind", "ro", "nosuid", "nodev"}}
}

// nodesByMount makes of the GPUs' nodes in a spec mounts of nodes, as a client
// does that passes devices by -v.
func nodesByMount(t *testing.T) []oci.SpecOpts {
	dir := t.TempDir()
	return amended(func(s *specs.Spec) {
		s.Linux.Devices = slices.DeleteFunc(s.Linux.Devices, func(d specs.LinuxDevice) bool {
			if _, ok := cdi.MinorOf(d.Path); !ok {
				return false
			}
			source := d.Path
			if gpu.Kind == harness.SoftwareGPU { // which has no node on the host
				source = filepath.Join(dir, filepath.Base(d.Path))
				if err := makeNode(source, d); err != nil {
					t.Error(err)
				}
			}
			s.Mounts = append(s.Mounts, specs.Mount{Type: "bind", Source: source, Destination: d.Path, Options: []string{"bind", "nosuid"}})
			return true
		})
	})
}

// A container whose GPU's node is a mount of its own goes on where another is
// mounted, or made: the old mount goes.
func TestMountedNode(t *testing.T) {
	result := two(t)
	k := start(t, harness.RunSpec{GPUs: []int{0}, Amend: nodesByMount(t)}, pattern(1)...)
	k.Expect(t, "verify", "bad=0")
	dir := checkpointed(t, result, k)
	for _, spec := range []harness.RunSpec{
		{GPUs: []int{1}, Amend: nodesByMount(t)},
		{GPUs: []int{1}},
		{GPUs: []int{0}, Amend: nodesByMount(t)},
	} {
		k = restored(t, result, spec, dir, k.Port)
		k.Expect(t, "verify", "bad=0")
		isOn(t, k, 0, uuid(spec.GPUs[0]))
		visible(t, k, spec.GPUs[0])
		dir = checkpointed(t, result, k)
	}
}

// Nodes that the driver shares between GPUs are made as the spec has them; those
// that the spec does not have any more go.
func TestSharedNodes(t *testing.T) {
	result := two(t)
	if gpu.Kind != harness.SoftwareGPU {
		t.Skip("a real GPU's containers have such nodes as it is")
	}
	with := func(paths ...string) []oci.SpecOpts {
		return amended(func(s *specs.Spec) {
			for _, path := range paths {
				mode := os.FileMode(0o640)
				s.Linux.Devices = append(s.Linux.Devices, specs.LinuxDevice{Path: path, Type: "c", Major: 1, Minor: 3, FileMode: &mode})
			}
		})
	}
	k := start(t, harness.RunSpec{GPUs: []int{0}, Amend: with("/dev/nvidia-nvswitch7", "/dev/nvidia-caps/nvidia-cap2")}, pattern(1)...)
	k.Expect(t, "verify", "bad=0")
	dir := checkpointed(t, result, k)
	r := restored(t, result, harness.RunSpec{GPUs: []int{1}, Amend: with("/dev/nvidia-modeset")}, dir, k.Port)
	r.Expect(t, "verify", "bad=0")
	st, err := os.Stat(inside(t, r, "/dev/nvidia-modeset"))
	if err != nil {
		t.Fatal(err)
	}
	if want := os.ModeDevice | os.ModeCharDevice | 0o640; st.Mode() != want {
		t.Errorf("the node's mode is %v, want %v", st.Mode(), want)
	}
	for _, path := range []string{"/dev/nvidia-nvswitch7", "/dev/nvidia-caps/nvidia-cap2"} {
		if _, err := os.Lstat(inside(t, r, path)); !os.IsNotExist(err) {
			t.Errorf("%s, a node that is not granted any more: %v", path, err)
		}
	}
}

// The cgroup's device rules after a restore are those of the new spec: a device
// that the checkpointed container could open, and this one may not, stays shut.
func TestRules(t *testing.T) {
	result := two(t)
	device, ok := spare(t)
	if !ok {
		t.Skip("this machine has no harmless device to try it with")
	}
	k := start(t, harness.RunSpec{GPUs: []int{0}, Amend: withDevice(device, true)}, append(pattern(1), "--open", device.Path)...)
	k.Expect(t, "verify", "bad=0") // and so it has opened it
	if err := k.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	k = start(t, harness.RunSpec{GPUs: []int{0}, Amend: withDevice(device, true)}, pattern(1)...)
	k.Expect(t, "verify", "bad=0")
	dir := checkpointed(t, result, k)
	r := restored(t, result, harness.RunSpec{GPUs: []int{1}, Amend: withDevice(device, false)}, dir, k.Port)
	r.Expect(t, "verify", "bad=0")
	visible(t, r, 1)
	err := tryIn(t, r, "open", "gpuwork", "plain", "--open", device.Path)
	if err == nil || !strings.Contains(err.Error(), "Operation not permitted") {
		t.Errorf("a device that is not granted was opened: %v", err)
	}
}

// spare is a node with the numbers of some device that any program may open and
// close, under a name of NVIDIA's.
func spare(t *testing.T) (specs.LinuxDevice, bool) {
	t.Helper()
	for _, path := range []string{"/dev/fuse", "/dev/cpu_dma_latency", "/dev/vsock", "/dev/loop-control", "/dev/hpet"} {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			continue
		}
		d := specs.LinuxDevice{Path: "/dev/nvidia-modeset", Type: "c", Major: int64(unix.Major(st.Rdev)), Minor: int64(unix.Minor(st.Rdev))}
		if d.Major != nodeMajor(t) || d.Minor != nodeMinor(t) {
			return d, true
		}
	}
	return specs.LinuxDevice{}, false
}

// withDevice adds a node to a spec, and leave to use it if allowed.
func withDevice(d specs.LinuxDevice, allowed bool) []oci.SpecOpts {
	return amended(func(s *specs.Spec) {
		s.Linux.Devices = append(s.Linux.Devices, d)
		if allowed {
			s.Linux.Resources.Devices = append(s.Linux.Resources.Devices, specs.LinuxDeviceCgroup{Allow: true, Type: "c", Major: &d.Major, Minor: &d.Minor, Access: "rwm"})
		}
	})
}

// A driver's file that this node has under another version is mounted where the
// checkpoint had the old one; so is one of which only the CDI specification
// knows. Without a like it is refused, and so is one that a process has loaded.
func TestDriverFiles(t *testing.T) {
	result := results.Add(t)
	const at, tool = "/usr/lib/libEGL_nvidia.so.560.35.03", "/usr/bin/nvidia-tool"
	old := harness.RunSpec{GPUs: []int{0}, Mounts: []specs.Mount{
		bindOf(file(t, "egl", "old"), at), bindOf(file(t, "tool", "old tool"), tool),
	}}
	k := start(t, old, pattern(1)...)
	k.Expect(t, "verify", "bad=0")
	dir := checkpointed(t, result, k)

	egl := file(t, "libEGL_nvidia.so.580.1.2", "new")
	added := bindOf(file(t, "firmware", "added"), "/usr/lib/libnvidia-added.so.580.1.2")
	spec := harness.RunSpec{GPUs: []int{0}, Mounts: []specs.Mount{bindOf(egl, "/usr/lib64/libEGL_nvidia.so.580.1.2"), added}}
	refused(t, spec, dir, "driver's files", tool)

	writeSpec(t, fmt.Sprintf(`{"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": [{"name": "9", "containerEdits": {"env": ["A=B"]}}],
		"containerEdits": {"mounts": [{"hostPath": %q, "containerPath": "/usr/local/bin/nvidia-tool"}]}}`, file(t, "new-tool", "new tool")))
	r := restored(t, result, spec, dir, k.Port)
	r.Expect(t, "verify", "bad=0")
	for path, want := range map[string]string{
		at: "new", "/usr/lib64/libEGL_nvidia.so.580.1.2": "new", tool: "new tool", added.Destination: "added",
	} {
		if got, err := os.ReadFile(inside(t, r, path)); err != nil || string(got) != want {
			t.Errorf("%s holds %q, error %v; want %q", path, got, err, want)
		}
	}
	// What was mounted after the restore is known to the next checkpoint.
	dir = checkpointed(t, result, r)
	r = restored(t, result, spec, dir, k.Port)
	r.Expect(t, "verify", "bad=0")
}

// A process cannot go on with another version of a library than it has loaded.
func TestLoadedDriverFile(t *testing.T) {
	result := results.Add(t)
	const at = "/usr/lib/libnvidia-loaded.so.560.35.03"
	k := start(t, harness.RunSpec{GPUs: []int{0}, Mounts: []specs.Mount{bindOf(file(t, "loaded", "old"), at)}}, append(pattern(1), "--open", at)...)
	k.Expect(t, "verify", "bad=0")
	dir := checkpointed(t, result, k)
	now := file(t, "libnvidia-loaded.so.580.1.2", "new")
	refused(t, harness.RunSpec{GPUs: []int{0}, Mounts: []specs.Mount{bindOf(now, "/usr/lib/libnvidia-loaded.so.580.1.2")}}, dir,
		at, "560.35.03", "580.1.2", "where the driver is the same")
}

// writeSpec makes a CDI specification of this node, until the test ends.
func writeSpec(t *testing.T, text string) {
	t.Helper()
	path := filepath.Join(cdiDir(), "test.json")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(path) })
}

// A container that asks for its GPU by nerdctl's hook gets it by CDI, and so can
// be checkpointed, and restored with a hook that asks for the other.
func TestHook(t *testing.T) {
	result := two(t)
	asks := func(name string) harness.RunSpec {
		spec := harness.RunSpec{}
		if gpu.Kind == harness.SoftwareGPU {
			spec.GPUs = []int{0} // for its libraries; the nodes go again
		} else {
			spec.Env = []string{"LD_LIBRARY_PATH=" + strings.Join(libraryDirs(), ":")}
		}
		spec.Amend = amended(func(s *specs.Spec) {
			s.Linux.Devices = nil
			s.Linux.Resources.Devices = slices.DeleteFunc(s.Linux.Resources.Devices, func(d specs.LinuxDeviceCgroup) bool {
				return d.Allow && d.Access == "rwm" && d.Major != nil && *d.Major == nodeMajor(t)
			})
			// Without a specification the hook stays, and runs: this one fails.
			s.Hooks = &specs.Hooks{CreateRuntime: []specs.Hook{{Path: "/bin/false", Args: []string{
				"containerd", "oci-hook", "--", "/usr/bin/nvidia-container-cli", "--load-kmods", "configure", "--device=" + name, "--pid={{pid}}", "{{rootfs}}",
			}}}}
		})
		return spec
	}
	spec := asks("0")
	spec.ID, spec.Image, spec.Args = harness.Name(t), image, []string{"gpuwork", "sleep"}
	if _, err := shared.Run(t.Context(), spec); err == nil {
		t.Fatal("a container whose hook fails was started")
	}

	if gpu.Kind == harness.SoftwareGPU {
		writeSpec(t, softwareSpec(t))
	} else {
		generateSpec(t)
	}
	k := start(t, asks("0"), pattern(1)...)
	k.Expect(t, "verify", "bad=0")
	isOn(t, k, 0, uuid(0))
	dir := checkpointed(t, result, k)
	refused(t, asks("5"), dir, "nvidia.com/gpu=5", "nvidia.com/gpu=0", "nvidia.com/gpu=1")
	r := restored(t, result, asks(uuid(1)), dir, k.Port)
	r.Expect(t, "verify", "bad=0")
	isOn(t, r, 0, uuid(1))
	visible(t, r, 1)
}

// generateSpec has gpuckpt write this node's CDI specification, until the test
// ends.
func generateSpec(t *testing.T) {
	t.Helper()
	program, err := bins.Path("gpuckpt")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(cdiDir(), "generated.json")
	cmd := exec.CommandContext(t.Context(), program, "cdi", "generate", "--output", path)
	cmd.Env = append(os.Environ(), shared.HostEnv()...)
	t.Cleanup(func() { os.Remove(path) })
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("gpuckpt cdi generate: %v: %s", err, out)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("gpuckpt cdi generate wrote\n%s", data)
}

// libraryDirs are where a real driver's libraries are on this machine.
func libraryDirs() []string {
	var dirs []string
	for _, file := range gpu.LibraryFiles() {
		dirs = append(dirs, filepath.Dir(file))
	}
	slices.Sort(dirs)
	return slices.Compact(dirs)
}

// softwareSpec is a CDI specification of the software GPU.
func softwareSpec(t *testing.T) string {
	t.Helper()
	node := func(name string) string {
		return fmt.Sprintf(`{"path": "/dev/%s", "type": "c", "major": %d, "minor": %d}`, name, nodeMajor(t), nodeMinor(t))
	}
	var devices []string
	for i, d := range gpu.Devices {
		for _, name := range []string{fmt.Sprint(i), d.UUID} {
			devices = append(devices, fmt.Sprintf(`{"name": %q, "containerEdits": {"deviceNodes": [%s]}}`, name, node(fmt.Sprintf("nvidia%d", i))))
		}
	}
	return fmt.Sprintf(`{"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": [%s], "containerEdits": {"deviceNodes": [%s]}}`,
		strings.Join(devices, ", "), node("nvidiactl"))
}
