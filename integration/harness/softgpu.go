// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

const (
	// softGPUs is how many GPUs the software driver shows.
	softGPUs = 2
	// softDriver is its version: the oldest branch that the real one was tried with.
	softDriver = "580.0-softcuda"
	// softMemory is each software GPU's memory in bytes.
	softMemory = 2 << 30
)

// standIns are harmless character devices that programs may open and close; the
// software GPU's nodes are nodes of the first that the machine has.
var standIns = []string{"/dev/loop-control", "/dev/cpu_dma_latency", "/dev/hpet", "/dev/fuse", "/dev/full"}

// findSoftware finds the software GPU's library, and a device to stand in for
// its nodes.
func findSoftware(bins Bins) (GPU, error) {
	cuda, err := bins.Path("softcuda/libcuda.so.1")
	if err != nil {
		var inDir error
		if cuda, inDir = bins.Path("libcuda.so.1"); inDir != nil {
			return GPU{}, fmt.Errorf("no software GPU: %w", err)
		}
	}
	standIn, err := softNode()
	if err != nil {
		return GPU{}, err
	}
	g := GPU{Kind: SoftwareGPU, Driver: softDriver, hostPath: filepath.Dir(cuda)}
	for _, name := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
		path := filepath.Join(filepath.Dir(cuda), name)
		if _, err := os.Stat(path); err != nil {
			return GPU{}, fmt.Errorf("no software GPU: %w", err)
		}
		// The same path inside as on the host: the library finds its own
		// symbols in another process by it.
		g.libraries = append(g.libraries, driverLibrary{host: path, container: path})
	}
	control := standIn
	control.path = "/dev/nvidiactl"
	g.shared = []deviceNode{control}
	for i := range softGPUs {
		node := standIn
		node.path = fmt.Sprintf("/dev/nvidia%d", i)
		g.Devices = append(g.Devices, GPUDevice{
			Index:  i,
			UUID:   fmt.Sprintf("GPU-5af7c0da-0000-4000-8000-%012x", i),
			Name:   "Software GPU",
			Memory: softMemory,
			node:   node,
		})
	}
	return g, nil
}

// softNode is the first stand-in that this machine has; its path is the host's.
func softNode() (deviceNode, error) {
	for _, path := range standIns {
		if node, err := charDevice(path, path); err == nil {
			return node, nil
		}
	}
	return deviceNode{}, fmt.Errorf("no software GPU: none of %s exists", strings.Join(standIns, ", "))
}

// softwareDir is where an instance keeps the software GPU's configuration and
// the nodes that programs outside containers open.
func (h home) softwareDir() string { return filepath.Join(h.dir, "softgpu") }

// prepareGPU makes what the software GPU needs outside containers: a
// configuration, and a directory with its nodes. For a real GPU it does nothing.
func (c *Containerd) prepareGPU() error {
	if c.opts.GPU.Kind != SoftwareGPU {
		return nil
	}
	standIn, err := softNode()
	if err != nil {
		return err
	}
	dev := filepath.Join(c.home.softwareDir(), "dev")
	if err := os.MkdirAll(dev, 0o755); err != nil {
		return fmt.Errorf("make the software GPU's nodes: %w", err)
	}
	names := []string{"nvidiactl"}
	for _, device := range c.opts.GPU.Devices {
		names = append(names, filepath.Base(device.node.path))
	}
	for _, name := range names {
		if err := os.Symlink(standIn.path, filepath.Join(dev, name)); err != nil {
			return fmt.Errorf("make the software GPU's nodes: %w", err)
		}
	}
	return c.SetSoftwareGPU("")
}

// SetSoftwareGPU replaces the software GPU's configuration in this instance, for
// the programs outside containers and, at their next step, for those inside:
// lines such as "fail=lock:702:1" or "checkpoint_delay_ms=500"
// (integration/softcuda). The GPUs' identities stay. An empty text takes all
// faults away.
func (c *Containerd) SetSoftwareGPU(lines string) error {
	if c.opts.GPU.Kind != SoftwareGPU {
		return errors.New("configure the software GPU: it is not in use")
	}
	var b strings.Builder
	// Several instances, of other programs too, are as many machines.
	fmt.Fprintf(&b, "machine=%s\ndriver=%s\n", c.home.name(), c.opts.GPU.Driver)
	for _, device := range c.opts.GPU.Devices {
		fmt.Fprintf(&b, "gpu%d.uuid=%s\ngpu%d.name=%s\ngpu%d.memory_mib=%d\n",
			device.Index, device.UUID, device.Index, device.Name, device.Index, device.Memory>>20)
	}
	b.WriteString(lines)
	// Written in place, not by rename: containers have this very file mounted.
	if err := os.WriteFile(c.softwareConfig(), []byte(b.String()), 0o644); err != nil {
		return fmt.Errorf("configure the software GPU: %w", err)
	}
	return nil
}

// softwareConfig is the software GPU's configuration file outside containers.
func (c *Containerd) softwareConfig() string {
	return filepath.Join(c.home.softwareDir(), "softcuda.conf")
}

// HostEnv are the variables, KEY=value each, with which programs outside
// containers find the driver: the shim's helper above all.
func (c *Containerd) HostEnv() []string {
	var env []string
	if dir := c.opts.GPU.hostPath; dir != "" {
		env = append(env, "LD_LIBRARY_PATH="+dir)
	}
	if c.opts.GPU.Kind == SoftwareGPU {
		env = append(env,
			"SOFTCUDA_DEV="+filepath.Join(c.home.softwareDir(), "dev"),
			"SOFTCUDA_CONF="+c.softwareConfig())
	}
	return env
}
