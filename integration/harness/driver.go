// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// driverDirs are where drivers keep their libraries when the loader's cache does
// not say.
var driverDirs = []string{
	"/usr/local/nvidia/lib64",
	"/usr/lib/x86_64-linux-gnu",
	"/usr/lib/aarch64-linux-gnu",
	"/usr/lib64",
	"/usr/lib",
}

// driverLibraries are the libraries that a CUDA program loads at run time: the
// driver's API, NVML, the PTX compiler and what these load in turn. Only the
// first must exist.
var driverLibraries = []string{
	"libcuda.so.*",
	"libnvidia-ml.so.*",
	"libnvidia-ptxjitcompiler.so.*",
	"libnvidia-nvvm.so.*",
	"libnvidia-nvvm70.so.*",
	"libnvidia-gpucomp.so.*",
}

// driverNodes are the device nodes that every GPU container gets where the
// machine has them; only nvidiactl must exist.
var driverNodes = []string{
	"/dev/nvidiactl",
	"/dev/nvidia-uvm",
	"/dev/nvidia-uvm-tools",
	"/dev/nvidia-caps/*",
}

// detectReal asks NVML for the GPUs, and finds their nodes and the driver's
// libraries.
func detectReal() (_ GPU, err error) {
	dir, known, err := driverDir()
	if err != nil {
		return GPU{}, err
	}
	ml := nvml.New(nvml.WithLibraryPath(filepath.Join(dir, "libnvidia-ml.so.1")))
	if ret := ml.Init(); ret != nvml.SUCCESS {
		return GPU{}, fmt.Errorf("start NVML: %s", nvmlError(ret))
	}
	defer func() {
		if ret := ml.Shutdown(); ret != nvml.SUCCESS {
			err = errors.Join(err, fmt.Errorf("end NVML: %s", nvmlError(ret)))
		}
	}()
	// The image has links for /lib and the like, and mounts below a link are
	// harder on CRIU than they need be.
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		return GPU{}, fmt.Errorf("find the driver's libraries: %w", err)
	}
	g := GPU{Kind: RealGPU}
	if !known {
		g.hostPath = dir
	}
	var ret nvml.Return
	if g.Driver, ret = ml.SystemGetDriverVersion(); ret != nvml.SUCCESS {
		return GPU{}, fmt.Errorf("read the driver's version: %s", nvmlError(ret))
	}
	count, ret := ml.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return GPU{}, fmt.Errorf("count the GPUs: %s", nvmlError(ret))
	}
	for i := range count {
		if !chosenGPU(i) {
			continue
		}
		device, err := readDevice(ml, i)
		if err != nil {
			return GPU{}, err
		}
		g.Devices = append(g.Devices, device)
	}
	if len(g.Devices) == 0 {
		return GPU{}, errors.New("the driver shows no GPU")
	}
	if g.shared, err = findNodes(); err != nil {
		return GPU{}, err
	}
	g.libraries, err = findLibraries(dir)
	return g, err
}

// EnvLane chooses the real GPUs that a test program may use, by index ("1" or "2,3"); by default all.
// Several programs then run beside each other on one machine.
const EnvLane = "GPUCKPT_TEST_LANE"

func chosenGPU(index int) bool {
	lane := os.Getenv(EnvLane)
	return lane == "" || slices.Contains(strings.Split(lane, ","), strconv.Itoa(index))
}

// readDevice asks NVML about one GPU.
func readDevice(ml nvml.Interface, index int) (GPUDevice, error) {
	device, ret := ml.DeviceGetHandleByIndex(index)
	if ret != nvml.SUCCESS {
		return GPUDevice{}, fmt.Errorf("find GPU %d: %s", index, nvmlError(ret))
	}
	d := GPUDevice{Index: index}
	if d.UUID, ret = device.GetUUID(); ret != nvml.SUCCESS {
		return GPUDevice{}, fmt.Errorf("read the UUID of GPU %d: %s", index, nvmlError(ret))
	}
	if d.Name, ret = device.GetName(); ret != nvml.SUCCESS {
		return GPUDevice{}, fmt.Errorf("read the name of GPU %d: %s", index, nvmlError(ret))
	}
	memory, ret := device.GetMemoryInfo()
	if ret != nvml.SUCCESS {
		return GPUDevice{}, fmt.Errorf("read the memory of GPU %d: %s", index, nvmlError(ret))
	}
	d.Memory = memory.Total
	minor, ret := device.GetMinorNumber()
	if ret != nvml.SUCCESS {
		return GPUDevice{}, fmt.Errorf("read the node of GPU %d: %s", index, nvmlError(ret))
	}
	path := fmt.Sprintf("/dev/nvidia%d", minor)
	var err error
	d.node, err = charDevice(path, path)
	return d, err
}

// nvmlError words an NVML error by its code: the library's own words are not to
// be had when it could not be loaded.
func nvmlError(ret nvml.Return) string {
	if ret == nvml.ERROR_LIBRARY_NOT_FOUND {
		return "NVML is not installed"
	}
	return nvml.ErrorString(ret)
}

// findNodes finds the nodes that all GPU containers get.
func findNodes() ([]deviceNode, error) {
	var nodes []deviceNode
	for i, pattern := range driverNodes {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return nil, fmt.Errorf("find the device %s: %w", pattern, err)
		}
		if i == 0 && len(paths) == 0 {
			return nil, fmt.Errorf("find the device %s: %w", pattern, os.ErrNotExist)
		}
		for _, path := range paths {
			node, err := charDevice(path, path)
			if err != nil {
				return nil, err
			}
			nodes = append(nodes, node)
		}
	}
	return nodes, nil
}

// driverDir is the directory of libcuda.so.1, and whether the host's loader
// looks there by itself.
func driverDir() (_ string, known bool, _ error) {
	// "libcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1"
	if out, err := exec.Command("ldconfig", "-p").Output(); err == nil {
		for line := range strings.Lines(string(out)) {
			name, path, ok := strings.Cut(strings.TrimSpace(line), " => ")
			if ok && strings.HasPrefix(name, "libcuda.so.1 ") && !strings.Contains(name, "(libc6)") {
				return filepath.Dir(path), true, nil
			}
		}
	}
	for _, dir := range driverDirs {
		if _, err := os.Stat(filepath.Join(dir, "libcuda.so.1")); err == nil {
			return dir, false, nil
		}
	}
	return "", false, errors.New("no NVIDIA driver: libcuda.so.1 is not installed")
}

// findLibraries lists the driver's libraries in a directory, under each of their
// names: by soname, and by the name that carries the driver's version.
func findLibraries(dir string) ([]driverLibrary, error) {
	var libraries []driverLibrary
	for _, pattern := range driverLibraries {
		paths, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			return nil, fmt.Errorf("find the driver's library %s: %w", pattern, err)
		}
		for _, path := range paths {
			host, err := filepath.EvalSymlinks(path)
			if err != nil {
				return nil, fmt.Errorf("find the driver's library %s: %w", path, err)
			}
			libraries = append(libraries, driverLibrary{host: host, container: path})
		}
	}
	slices.SortFunc(libraries, func(a, b driverLibrary) int { return strings.Compare(a.container, b.container) })
	return libraries, nil
}
