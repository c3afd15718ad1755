// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// EnvGPU chooses between the kinds of GPU: "real", "software", or empty for a
// real one where there is one.
const EnvGPU = "GPUCKPT_GPU"

// GPUKind tells a real GPU from the test double.
type GPUKind string

// The kinds of GPU.
const (
	NoGPU       GPUKind = ""
	RealGPU     GPUKind = "real"
	SoftwareGPU GPUKind = "software"
)

// GPU is the machine's GPUs and what a container needs to use them. The zero
// value is a machine without.
type GPU struct {
	Kind GPUKind
	// Driver is the driver's version ("580.159.04").
	Driver string
	// Devices are the GPUs by index.
	Devices []GPUDevice
	// libraries are the driver's files, by the path in the container.
	libraries []driverLibrary
	// hostPath is the directory of the driver's libraries on the host, where
	// the loader does not look there by itself.
	hostPath string
	// shared are the device nodes that every GPU container gets.
	shared []deviceNode
}

// GPUDevice is one GPU.
type GPUDevice struct {
	Index int
	// UUID is as NVML prints it: "GPU-" and 36 characters.
	UUID string
	Name string
	// Memory is the whole of it, in bytes.
	Memory uint64
	node   deviceNode
}

// Path is its node in containers, which a real GPU has on the host too.
func (d GPUDevice) Path() string { return d.node.path }

// driverLibrary is a shared library that containers get by a mount.
type driverLibrary struct {
	host, container string
}

// deviceNode is a character device in a container.
type deviceNode struct {
	path         string // in the container
	major, minor int64
}

// DetectGPU finds the machine's GPUs through NVML, or falls back to the software
// GPU out of Bins ("softcuda/libcuda.so.1", or the same in one of the
// directories themselves). GPUCKPT_GPU forces one of the two.
//
// Without either the error says what was missing of each.
func DetectGPU(bins Bins) (GPU, error) {
	switch choice := os.Getenv(EnvGPU); choice {
	case "real":
		return detectReal()
	case "software":
		return findSoftware(bins)
	case "":
		real, why := detectReal()
		if why == nil {
			return real, nil
		}
		soft, err := findSoftware(bins)
		if err != nil {
			return GPU{}, fmt.Errorf("find a GPU: %w; %w", why, err)
		}
		return soft, nil
	default:
		return GPU{}, fmt.Errorf("%s is %q: real and software are known", EnvGPU, choice)
	}
}

// LibraryFiles are the host's paths of the driver's libraries.
func (g GPU) LibraryFiles() []string {
	var files []string
	for _, library := range g.libraries {
		files = append(files, library.host)
	}
	slices.Sort(files)
	return slices.Compact(files)
}

// SpecOpts give a container the GPUs of these indices: device nodes, leave to use
// them, and the driver's libraries. None of them for no index.
func (g GPU) SpecOpts(indices ...int) []oci.SpecOpts {
	if len(indices) == 0 {
		return nil
	}
	opts := []oci.SpecOpts{oci.WithMounts(g.mounts()), oci.WithEnv(g.containerEnv())}
	for _, node := range g.shared {
		opts = append(opts, withDevice(node))
	}
	for _, index := range indices {
		if index < 0 || index >= len(g.Devices) {
			return []oci.SpecOpts{func(context.Context, oci.Client, *containers.Container, *oci.Spec) error {
				return fmt.Errorf("GPU %d of %d", index, len(g.Devices))
			}}
		}
		opts = append(opts, withDevice(g.Devices[index].node))
	}
	return opts
}

// mounts are the driver's libraries, read-only, without set-user-id and devices.
func (g GPU) mounts() []specs.Mount {
	var mounts []specs.Mount
	for _, library := range g.libraries {
		mounts = append(mounts, specs.Mount{
			Destination: library.container,
			Source:      library.host,
			Type:        "bind",
			Options:     []string{"rbind", "ro", "nosuid", "nodev", "rprivate"},
		})
	}
	return mounts
}

// containerEnv makes the loader find the driver's libraries.
func (g GPU) containerEnv() []string {
	dirs := map[string]bool{}
	var list []string
	for _, library := range g.libraries {
		if dir := filepath.Dir(library.container); !dirs[dir] {
			dirs[dir] = true
			list = append(list, dir)
		}
	}
	return []string{"LD_LIBRARY_PATH=" + strings.Join(list, ":")}
}

// withDevice makes a node in the container's /dev and allows its use. The node's
// numbers need not be those of the host's node of that name.
func withDevice(node deviceNode) oci.SpecOpts {
	return func(_ context.Context, _ oci.Client, _ *containers.Container, s *oci.Spec) error {
		mode := os.FileMode(0o666)
		s.Linux.Devices = append(s.Linux.Devices, specs.LinuxDevice{
			Path: node.path, Type: "c", Major: node.major, Minor: node.minor, FileMode: &mode,
		})
		if s.Linux.Resources == nil {
			s.Linux.Resources = &specs.LinuxResources{}
		}
		s.Linux.Resources.Devices = append(s.Linux.Resources.Devices, specs.LinuxDeviceCgroup{
			Allow: true, Type: "c", Major: &node.major, Minor: &node.minor, Access: "rwm",
		})
		return nil
	}
}

// charDevice reads the numbers of a character device of the host, for a node of
// that path in a container.
func charDevice(host, container string) (deviceNode, error) {
	var stat unix.Stat_t
	if err := unix.Stat(host, &stat); err != nil {
		return deviceNode{}, fmt.Errorf("find the device %s: %w", host, err)
	}
	if stat.Mode&unix.S_IFMT != unix.S_IFCHR {
		return deviceNode{}, fmt.Errorf("find the device %s: it is no character device", host)
	}
	return deviceNode{path: container, major: int64(unix.Major(stat.Rdev)), minor: int64(unix.Minor(stat.Rdev))}, nil
}
