// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package devnode

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// Restored describes the nodes that a restored container must have.
type Restored struct {
	// Spec is the container's, made to fit this machine.
	Spec *specs.Spec
	// Devices are those that the container gets; its spec may lack some (cdi.Rebind).
	Devices []specs.LinuxDevice
	// Stray are paths at which CRIU mounts a node that the spec does not grant, and that must go.
	Stray []string
}

// Fix replaces the GPU nodes that CRIU has restored by those of the spec, mounts the driver's files
// that the spec mounts and the dump did not have, and gives bind mounts the options of the spec. It masks
// what the spec masks and the dump did not. On an error some nodes are replaced and some are not.
func (p *Restored) Fix(pid int) error {
	if p.Spec == nil {
		return nil
	}
	return inDev(pid, func(dev int) error {
		if err := p.dropStray(pid); err != nil {
			return err
		}
		if err := p.removeNodes(dev); err != nil {
			return err
		}
		if !p.inUserNamespace() { // which may not make nodes
			for _, d := range p.Nodes() {
				if err := makeNode(dev, d); err != nil {
					return fmt.Errorf("make %s in the container: %w", d.Path, err)
				}
			}
		}
		if err := p.mountMissing(pid); err != nil {
			return err
		}
		return p.barMounts(pid)
	})
}

// Fixed returns the spec that describes a container which is fixed: without the mounts that only CRIU
// had to make, and with the devices that made room for them.
func (p *Restored) Fixed() *specs.Spec {
	if p.Spec == nil || p.Spec.Linux == nil || len(p.Stray) == 0 {
		return p.Spec
	}
	spec, linux := *p.Spec, *p.Spec.Linux
	linux.Devices, spec.Linux = p.Devices, &linux
	spec.Mounts = slices.DeleteFunc(slices.Clone(spec.Mounts), func(m specs.Mount) bool { return slices.Contains(p.Stray, path.Clean(m.Destination)) })
	return &spec
}

// barMounts gives the spec's bind mounts the flags that bar something. A container with CAP_SYS_ADMIN
// may have changed its own.
func (p *Restored) barMounts(pid int) error {
	if p.admin() {
		return nil
	}
	mounts := slices.DeleteFunc(slices.Clone(p.Spec.Mounts), func(m specs.Mount) bool {
		return !cdi.IsBind(m) || flagsOf(m) == 0 || slices.Contains(p.Stray, path.Clean(m.Destination))
	})
	if len(mounts) == 0 {
		return nil
	}
	return host.InMountNamespace(pid, func() error {
		for _, m := range mounts {
			if err := bar(m.Destination, flagsOf(m)); err != nil {
				return fmt.Errorf("set the options of mount %s in the container: %w", m.Destination, err)
			}
		}
		return nil
	})
}

// admin reports whether the container could mount what it likes.
func (p *Restored) admin() bool {
	return p.Spec.Process.Capabilities != nil && slices.Contains(p.Spec.Process.Capabilities.Bounding, "CAP_SYS_ADMIN")
}

// Nodes returns the devices that are NVIDIA's, or a GPU's for display.
func (p *Restored) Nodes() []specs.LinuxDevice {
	return slices.DeleteFunc(slices.Clone(p.Devices), func(d specs.LinuxDevice) bool {
		return !cdi.IsNode(d.Path) && !strings.HasPrefix(path.Clean(d.Path), "/dev/dri/")
	})
}

func (p *Restored) inUserNamespace() bool {
	return p.Spec.Linux != nil && slices.ContainsFunc(p.Spec.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == specs.UserNamespace })
}

// has reports whether the container keeps what CRIU has put at a path.
func (p *Restored) has(at string) bool {
	return !slices.Contains(p.Stray, at) &&
		(slices.ContainsFunc(p.Spec.Mounts, func(m specs.Mount) bool { return path.Clean(m.Destination) == at }) ||
			slices.ContainsFunc(p.Devices, func(d specs.LinuxDevice) bool { return path.Clean(d.Path) == at }))
}

func (p *Restored) removeNodes(dev int) error {
	return eachNode(dev, func(name, at string) error {
		if p.has(at) {
			return nil
		}
		if err := removeBeneath(dev, name); err != nil {
			return fmt.Errorf("remove %s from the container: %w", at, err)
		}
		return nil
	})
}

// dropStray unmounts the nodes that CRIU had to mount; removeNodes removes the files below.
func (p *Restored) dropStray(pid int) error {
	if len(p.Stray) == 0 {
		return nil
	}
	return host.InMountNamespace(pid, func() error {
		for _, at := range p.Stray {
			dir, err := openFromRoot(path.Dir(at))
			if err == nil {
				err = unix.Fchdir(dir)
				unix.Close(dir)
			}
			if err == nil {
				err = unix.Unmount(path.Base(at), unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
			}
			if err != nil {
				return fmt.Errorf("unmount %s in the container: %w", at, err)
			}
		}
		return nil
	})
}

// masks returns mounts on what the spec masks of the kernel's files. A dump lacks some if its node had
// fewer processors, or a module less. A container with CAP_SYS_ADMIN may have unmounted its own.
func (p *Restored) masks() (mounts []specs.Mount) {
	if p.Spec.Linux == nil || p.admin() {
		return nil
	}
	for _, at := range p.Spec.Linux.MaskedPaths {
		if at = path.Clean("/" + at); strings.HasPrefix(at, "/proc/") || strings.HasPrefix(at, "/sys/") {
			mounts = append(mounts, specs.Mount{Source: "/dev/null", Destination: at, Type: mask})
		}
	}
	return mounts
}

// mountMissing mounts the spec's files of the driver that the dump did not have, and masks.
func (p *Restored) mountMissing(pid int) error {
	mounts := slices.DeleteFunc(slices.Clone(p.Spec.Mounts), func(m specs.Mount) bool {
		at := path.Clean(m.Destination)
		return !cdi.IsBind(m) || !cdi.IsNode(at) && !cdi.IsDriverFile(at) || slices.Contains(p.Stray, at)
	})
	if p.inUserNamespace() {
		for _, d := range p.Nodes() {
			mounts = append(mounts, specs.Mount{Source: d.Path, Destination: d.Path, Options: []string{"nosuid", "noexec"}})
		}
	}
	if mounts = append(mounts, p.masks()...); len(mounts) == 0 {
		return nil
	}
	// As a rule none is missing. The end of each tree waits for all processors (synchronize_rcu_expedited
	// in namespace_unlock). While another process unmapped 6 GB, 20 trees took 2 ms, and up to 69.
	err := host.InMountNamespace(pid, func() (err error) {
		mounts, err = missing(mounts)
		return err
	})
	if err != nil || len(mounts) == 0 {
		return err
	}
	var trees []tree
	defer func() {
		for _, t := range trees {
			unix.Close(t.fd)
		}
	}()
	for _, m := range mounts {
		t, err := openTree(m)
		if err != nil {
			return err
		}
		trees = append(trees, t)
	}
	return host.InMountNamespace(pid, func() error {
		for _, t := range trees {
			if err := t.mount(); err != nil {
				return fmt.Errorf("mount %s in the container: %w", t.at, err)
			}
		}
		return nil
	})
}
