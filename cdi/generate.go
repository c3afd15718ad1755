// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/atomicwriter"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"
)

// ErrNoDriver reports that the driver's files were not found.
var ErrNoDriver = errors.New("the NVIDIA driver's files are not there")

// Node is a node that Generate writes a specification of.
type Node struct {
	// GPUs are to be named. Partitioned ones (MIG) are not, but count in NVML's indices.
	GPUs, Partitioned []GPU
	// Driver is the driver's version, with which the names of its libraries end.
	Driver string
	// Root is the directory of the driver's files: "/", or "/run/nvidia/driver".
	Root string
}

// cdiVersion is the oldest version of the format with all fields used here.
const cdiVersion = "0.6.0"

var (
	// libraryDirs are where drivers keep their libraries.
	libraryDirs = []string{"/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/nvidia/lib64", "/usr/local/nvidia/lib"}
	// libraryForms are those that programs for computing load, and their tools.
	libraryForms = []string{
		"libcuda.so", "libcudadebugger.so", "libnvidia-ml.so", "libnvidia-cfg.so", "libnvidia-ptxjitcompiler.so", "libnvidia-nvvm.so", "libnvidia-nvvm70.so",
		"libnvidia-gpucomp.so", "libnvidia-opencl.so", "libnvidia-allocator.so", "libnvidia-pkcs11.so", "libnvidia-pkcs11-openssl3.so",
		"libnvidia-sandboxutils.so", "libnvcuvid.so", "libnvidia-encode.so", "libnvidia-opticalflow.so",
	}
	toolNames = []string{"nvidia-smi", "nvidia-debugdump"}
	toolDirs  = []string{"/usr/bin", "/usr/local/nvidia/bin", "/usr/local/bin"}
	// sharedNodes are what every container with a GPU gets where it is there.
	sharedNodes = []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}
)

// Generate returns a CDI specification of the node: its GPUs by index, by UUID and together as
// "all", and the driver's libraries and tools for computing. It has no hooks: a library is mounted
// under each of its names, so that the loader needs no new cache.
func (n Node) Generate() (*cdispecs.Spec, error) {
	n.Root = cmp.Or(n.Root, "/")
	var err error
	if n.Root, err = filepath.EvalSymlinks(n.Root); err != nil {
		return nil, fmt.Errorf("find the driver's files: %w", err)
	}
	if len(n.GPUs) == 0 {
		return nil, errors.New("there is no GPU that a specification could name")
	}
	spec := &cdispecs.Spec{Version: cdiVersion, Kind: Kind}
	var all cdispecs.ContainerEdits
	for _, g := range n.numbered() {
		if g.Minor < 0 {
			return nil, fmt.Errorf("the node of GPU %s is not known: NVML is needed (libnvidia-ml.so.1)", g.UUID)
		}
		node := &cdispecs.DeviceNode{Path: NodePath(g.Minor)}
		all.DeviceNodes = append(all.DeviceNodes, node)
		edits := cdispecs.ContainerEdits{DeviceNodes: []*cdispecs.DeviceNode{node}}
		spec.Devices = append(spec.Devices,
			cdispecs.Device{Name: strconv.Itoa(g.Index), ContainerEdits: edits},
			cdispecs.Device{Name: g.UUID, ContainerEdits: edits})
	}
	spec.Devices = append(spec.Devices, cdispecs.Device{Name: "all", ContainerEdits: all})
	// So that a hook of the toolkit, if there is one, leaves the container alone.
	spec.ContainerEdits.Env = []string{visibleDevices + "=void"}
	for _, node := range sharedNodes {
		if exists(node) {
			spec.ContainerEdits.DeviceNodes = append(spec.ContainerEdits.DeviceNodes, &cdispecs.DeviceNode{Path: node})
		}
	}
	files, err := n.files()
	if err != nil {
		return nil, fmt.Errorf("find the driver's files: %w", err)
	}
	for _, f := range files {
		spec.ContainerEdits.Mounts = append(spec.ContainerEdits.Mounts, &cdispecs.Mount{
			HostPath: f.Host, ContainerPath: f.Container, Options: []string{"ro", "nosuid", "nodev", "rbind", "rprivate"},
		})
	}
	return spec, nil
}

// numbered returns the GPUs by bus, with NVML's indices: CUDA counts GPUs by speed.
func (n Node) numbered() []GPU {
	slices.SortStableFunc(n.GPUs, func(a, b GPU) int { return cmp.Compare(a.PCIBusID, b.PCIBusID) })
	index := 0
	for i := range n.GPUs {
		for slices.ContainsFunc(n.Partitioned, func(g GPU) bool { return g.Index == index }) {
			index++
		}
		n.GPUs[i].Index = index
		index++
	}
	return n.GPUs
}

// files returns the driver's libraries, under each of their names, and its tools. Containers have
// them at the same paths, without symbolic links, which CRIU handles best.
func (n Node) files() ([]File, error) {
	dir, err := n.libraryDir()
	if err != nil {
		return nil, err
	}
	var files []File
	add := func(dir, name string) error {
		real, err := filepath.EvalSymlinks(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		at := strings.TrimPrefix(dir, strings.TrimSuffix(n.Root, "/"))
		files = append(files, File{Host: real, Container: path.Join("/", at, name)})
		return nil
	}
	for _, form := range libraryForms {
		names, _ := filepath.Glob(filepath.Join(dir, form+"*"))
		for _, name := range names {
			base := filepath.Base(name)
			if base != form && !strings.HasPrefix(base, form+".") || !n.ours(name) {
				continue
			}
			if err := add(dir, base); err != nil {
				return nil, err
			}
		}
	}
	for _, tool := range toolNames {
		for _, d := range toolDirs {
			if d = filepath.Join(n.Root, d); exists(filepath.Join(d, tool)) {
				if err := add(d, tool); err != nil {
					return nil, err
				}
				break
			}
		}
	}
	return files, nil
}

// ours reports whether a library is this driver's: another version may lie beside it.
func (n Node) ours(name string) bool {
	real, err := filepath.EvalSymlinks(name)
	version := DriverVersion(real)
	return err == nil && (version == "" || version == n.Driver)
}

// libraryDir returns the directory of this driver's libcuda.so.1.
func (n Node) libraryDir() (string, error) {
	var dirs []string
	if n.Root == "/" {
		dirs = loaderDirs()
	}
	for _, dir := range libraryDirs {
		dirs = append(dirs, filepath.Join(n.Root, dir))
	}
	for _, dir := range dirs {
		if name := filepath.Join(dir, "libcuda.so.1"); exists(name) && n.ours(name) {
			return filepath.EvalSymlinks(dir)
		}
	}
	return "", fmt.Errorf("%w: no libcuda.so.1 of version %s in %s", ErrNoDriver, n.Driver, strings.Join(dirs, ", "))
}

// loaderDirs returns the directories in which the loader's cache has libcuda.so.1.
func loaderDirs() (dirs []string) {
	for _, ldconfig := range []string{"ldconfig", "/sbin/ldconfig"} {
		out, err := exec.Command(ldconfig, "-p").Output()
		if err != nil {
			continue
		}
		// "libcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1"
		for line := range strings.Lines(string(out)) {
			name, file, ok := strings.Cut(strings.TrimSpace(line), " => ")
			if ok && strings.HasPrefix(name, "libcuda.so.1 ") && !strings.Contains(name, "(libc6)") {
				dirs = append(dirs, filepath.Dir(file))
			}
		}
		return dirs
	}
	return nil
}

// Encode returns a specification as JSON. It refuses one that CDI would not accept.
func Encode(spec *cdispecs.Spec) (_ []byte, err error) {
	data, err := json.MarshalIndent(spec, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode the CDI specification: %w", err)
	}
	data = append(data, '\n')
	// The library checks what it reads out of a file, and nothing else.
	f, err := os.CreateTemp("", "gpuckpt-cdi-*.json")
	if err != nil {
		return nil, fmt.Errorf("check the CDI specification: %w", err)
	}
	defer func() { err = errors.Join(err, os.Remove(f.Name())) }()
	_, err = f.Write(data)
	if err = errors.Join(err, f.Close()); err == nil {
		_, err = cdilib.ReadSpec(f.Name(), 0)
	}
	if err != nil {
		return nil, fmt.Errorf("check the CDI specification: %w", err)
	}
	return data, nil
}

// WriteFile writes a specification as JSON, by rename. It refuses one that CDI would not accept,
// and a name that does not end in .json. On an error the file is as it was.
func WriteFile(name string, spec *cdispecs.Spec) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("write the CDI specification %s: %w", name, err)
		}
	}()
	data, err := Encode(spec)
	if err != nil {
		return err
	}
	if filepath.Ext(name) != ".json" {
		return errors.New("its name must end in .json, else nobody reads it")
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	return atomicwriter.WriteFile(name, data, 0o644)
}
