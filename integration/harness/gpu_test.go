// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"
)

func TestSpecOpts(t *testing.T) {
	g := GPU{
		Kind:      RealGPU,
		Devices:   []GPUDevice{{Index: 0, node: deviceNode{"/dev/nvidia0", 195, 0}}, {Index: 1, node: deviceNode{"/dev/nvidia1", 195, 1}}},
		shared:    []deviceNode{{"/dev/nvidiactl", 195, 255}},
		libraries: []driverLibrary{{"/lib/libcuda.so.580", "/usr/lib/libcuda.so.1"}, {"/lib/libcuda.so.580", "/usr/lib/libcuda.so.580"}},
	}
	s := &oci.Spec{Process: &specs.Process{}, Linux: &specs.Linux{}}
	for _, opt := range g.SpecOpts(1) {
		if err := opt(t.Context(), nil, nil, s); err != nil {
			t.Fatal(err)
		}
	}
	var nodes []string
	for _, device := range s.Linux.Devices {
		nodes = append(nodes, device.Path)
	}
	if !slices.Equal(nodes, []string{"/dev/nvidiactl", "/dev/nvidia1"}) {
		t.Errorf("nodes %v", nodes)
	}
	rules := s.Linux.Resources.Devices
	if len(rules) != 2 || !rules[1].Allow || *rules[1].Major != 195 || *rules[1].Minor != 1 || rules[1].Access != "rwm" {
		t.Errorf("device rules %+v", rules)
	}
	if len(s.Mounts) != 2 || s.Mounts[0].Source != "/lib/libcuda.so.580" || s.Mounts[0].Destination != "/usr/lib/libcuda.so.1" || !slices.Contains(s.Mounts[0].Options, "ro") {
		t.Errorf("mounts %+v", s.Mounts)
	}
	if !slices.Equal(s.Process.Env, []string{"LD_LIBRARY_PATH=/usr/lib"}) {
		t.Errorf("environment %v", s.Process.Env)
	}
	if opts := g.SpecOpts(); opts != nil {
		t.Errorf("%d options for no GPU", len(opts))
	}
	for _, opt := range g.SpecOpts(2) {
		if err := opt(t.Context(), nil, nil, s); err == nil {
			t.Error("GPU 2 of 2 was given")
		}
	}
	if files := g.LibraryFiles(); !slices.Equal(files, []string{"/lib/libcuda.so.580"}) {
		t.Errorf("library files %v", files)
	}
}

func TestFindLibraries(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"libcuda.so.580.1", "libnvidia-ml.so.580.1", "libcudadebugger.so.580.1", "libc.so.6"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("libcuda.so.580.1", filepath.Join(dir, "libcuda.so.1")); err != nil {
		t.Fatal(err)
	}
	got, err := findLibraries(dir)
	want := []driverLibrary{
		{dir + "/libcuda.so.580.1", dir + "/libcuda.so.1"},
		{dir + "/libcuda.so.580.1", dir + "/libcuda.so.580.1"},
		{dir + "/libnvidia-ml.so.580.1", dir + "/libnvidia-ml.so.580.1"},
	}
	if !slices.Equal(got, want) || err != nil {
		t.Errorf("libraries %v, error %v, want %v", got, err, want)
	}
}

func TestDetectGPURefusesUnknownKind(t *testing.T) {
	t.Setenv(EnvGPU, "imaginary")
	if _, err := DetectGPU(Bins{}); err == nil || !strings.Contains(err.Error(), "imaginary") {
		t.Errorf("error %v", err)
	}
}

// A container with the software GPU counts on it; one without finds no driver.
func TestSoftwareGPU(t *testing.T) {
	t.Setenv(EnvGPU, "software")
	bins, err := FindBins()
	if errors.Is(err, ErrNoBins) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	gpu, err := DetectGPU(bins)
	if err != nil {
		t.Fatal(err)
	}
	c := startForTest(t, Options{GPU: gpu})
	port, err := FreePort()
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"gpuwork", "counter", "--port", strconv.Itoa(port)}
	k, err := c.Run(t.Context(), RunSpec{ID: "gpu", Runtime: RuncRuntime, Port: port, GPUs: []int{0, 1}, Args: args})
	if err != nil {
		t.Fatal(err)
	}
	expect(t, k, "x", "101")
	expect(t, k, "x", "102")
	if err := k.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	out, err := c.RunAttached(t.Context(), RunSpec{ID: "none", Runtime: RuncRuntime, Args: args}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if out.ExitCode == 0 || !strings.Contains(out.Stderr, "libcuda") {
		t.Errorf("without a GPU: %+v", out)
	}
}

func TestAsk(t *testing.T) {
	port, err := FreePort()
	if err != nil {
		t.Fatal(err)
	}
	k := &Container{ID: "asked", Port: port}
	// Nothing listens yet: the question is repeated until something does.
	go func() {
		time.Sleep(50 * time.Millisecond)
		conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port})
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		for buf := make([]byte, 64); ; {
			n, from, err := conn.ReadFromUDP(buf)
			if err != nil || string(buf[:n]) == "end" {
				return
			}
			if _, err := conn.WriteToUDP([]byte("you said "+string(buf[:n])+"\n"), from); err != nil {
				t.Error(err)
			}
		}
	}()
	if got, err := k.Ask(t.Context(), "hello"); got != "you said hello" || err != nil {
		t.Errorf("answer %q, error %v", got, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := k.Ask(ctx, "end"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no answer: error %v, want the deadline's", err)
	}
	if _, err := (&Container{ID: "mute"}).Ask(t.Context(), "hello"); err == nil {
		t.Error("a container without a port answered")
	}
}
