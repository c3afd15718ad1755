// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"errors"
	"fmt"
	"os"
	"path"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
)

// grantDevices gives the running container access to GPUs: the device nodes in its
// /dev, and the rules of its cgroup. On an error it has none of them.
func (c *container) grantDevices(gpus []cuda.GPU) error {
	for i, d := range gpus {
		node, err := deviceNumbers(gpuNode(d))
		if err == nil {
			err = c.grantDevice(d, node)
		}
		if err != nil {
			return joinBack(fmt.Errorf("give the container GPU %s: %w", d.UUID, err), c.revokeDevices(gpus[:i+1], nil))
		}
	}
	return nil
}

func (c *container) grantDevice(d cuda.GPU, node deviceNode) error {
	if err := c.setDevice(node, true); err != nil {
		return err
	}
	return c.inDev(func(dev int) error {
		return makeNode(dev, specs.LinuxDevice{Path: gpuNode(d), Type: "c", Major: node.major, Minor: node.minor})
	})
}

// revokeDevices undoes grantDevices. A device that one of keep has too stays allowed.
func (c *container) revokeDevices(gpus, keep []cuda.GPU) error {
	var errs []error
	for _, d := range gpus {
		errs = append(errs, c.inDev(func(dev int) error { return removeBeneath(dev, path.Base(gpuNode(d))) }))
		node, err := deviceNumbers(gpuNode(d))
		if errors.Is(err, os.ErrNotExist) {
			continue // and nobody can use it
		}
		if err == nil && !slices.ContainsFunc(keep, func(k cuda.GPU) bool {
			other, err := deviceNumbers(gpuNode(k))
			return err == nil && other == node
		}) {
			err = c.setDevice(node, false)
		}
		errs = append(errs, err)
	}
	return joinBack(nil, errs...)
}

func gpuNode(d cuda.GPU) string { return fmt.Sprintf("/dev/nvidia%d", d.Minor) }

// inDev calls do with the container's /dev, unless that is the host's own, in
// which every node is there.
func (c *container) inDev(do func(dev int) error) error {
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", c.pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the container's root: %w", err)
	}
	defer unix.Close(root)
	dev, err := openBeneath(root, "dev", unix.O_DIRECTORY)
	if err != nil {
		return fmt.Errorf("open the container's /dev: %w", err)
	}
	defer unix.Close(dev)
	if shared, err := isHostDev(dev); err != nil || shared {
		return err
	}
	return do(dev)
}

// regrant notes what the container has access to after a resumption elsewhere.
func (c *container) regrant(granted, revoked []cuda.GPU) {
	minors := slices.DeleteFunc(slices.Clone(c.request.Minors), func(n int) bool {
		return slices.ContainsFunc(revoked, func(d cuda.GPU) bool { return d.Minor == n })
	})
	for _, d := range granted {
		if !slices.Contains(minors, d.Minor) {
			minors = append(minors, d.Minor)
		}
	}
	slices.Sort(minors)
	c.request.Minors = minors
}
