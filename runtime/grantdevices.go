// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"fmt"
	"slices"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/sequence"
)

// grantDevices gives the running container access to GPUs. On an error it has none of
// them.
func grantDevices(c *container, gpus []cuda.GPU) error {
	for i, d := range gpus {
		if err := c.devices.Grant(c.pid, gpuNode(d)); err != nil {
			return sequence.Join(fmt.Errorf("give the container GPU %s: %w", d.UUID, err), revokeDevices(c, gpus[:i+1], nil))
		}
	}
	return nil
}

// revokeDevices undoes grantDevices. A device that one of keep has too stays allowed.
func revokeDevices(c *container, gpus, keep []cuda.GPU) error {
	var kept []string
	for _, d := range keep {
		kept = append(kept, gpuNode(d))
	}
	var errs []error
	for _, d := range gpus {
		errs = append(errs, c.devices.Revoke(c.pid, gpuNode(d), kept))
	}
	return sequence.Join(nil, errs...)
}

func gpuNode(d cuda.GPU) string { return fmt.Sprintf("/dev/nvidia%d", d.Minor) }

// regrant notes what the container has access to after a resumption elsewhere.
func regrant(c *container, granted, revoked []cuda.GPU) {
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
