// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package nodes

import (
	"errors"
	"fmt"
	"path"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cdi"
)

// List returns NVIDIA's nodes in the /dev of a container, by the pid of a process in it:
// those of its spec, and those that a resume on other GPUs or NVIDIA's library has added.
func List(pid int) ([]specs.LinuxDevice, error) {
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the container's root: %w", err)
	}
	defer unix.Close(root)
	dev, err := openBeneath(root, "dev")
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the container's /dev: %w", err)
	}
	defer unix.Close(dev)
	var found []specs.LinuxDevice
	for _, dir := range cdi.NodeDirs() {
		names, err := listBeneath(dev, dir)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list the container's %s: %w", path.Join("/dev", dir), err)
		}
		for _, name := range names {
			var st unix.Stat_t
			at := path.Join("/dev", dir, name)
			if !cdi.IsNode(at) || unix.Fstatat(dev, path.Join(dir, name), &st, unix.AT_SYMLINK_NOFOLLOW) != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR {
				continue
			}
			found = append(found, specs.LinuxDevice{Path: at, Type: "c", Major: int64(unix.Major(st.Rdev)), Minor: int64(unix.Minor(st.Rdev))})
		}
	}
	return found, nil
}
