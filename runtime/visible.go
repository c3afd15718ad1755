// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/config"
)

// visibleGPUs are the UUIDs of the GPUs that the container is granted; nil as
// below.
func (c *container) visibleGPUs() []string {
	if c.toolkit { // it may give more than the spec says
		return nil
	}
	return visibleGPUs(cuda.ProcGPUs, c.request)
}

// visibleGPUs are the UUIDs of the GPUs that a spec grants, by a directory like
// cuda.ProcGPUs. nil, which is all of the node's, where that is not certain.
func visibleGPUs(proc string, request cdi.Request) []string {
	if !request.Exact() {
		return nil
	}
	uuids, err := cuda.UUIDs(proc, request.Minors)
	if err != nil {
		return nil // it only takes longer
	}
	return uuids
}

// startHost starts a helper outside the container that brings up the GPUs of
// these UUIDs only, and asks it for them by ask. Where the driver cannot do with
// them, as with a partitioned one, it brings up all (nil).
func startHost(ctx context.Context, node config.Node, visible []string, ask func(*cuda.Helper, context.Context) (cuda.Info, error)) (*cuda.Helper, cuda.Info, error) {
	helper, err := startHelper(ctx, node, cuda.Options{Visible: visible})
	if err != nil {
		return nil, cuda.Info{}, err
	}
	info, err := ask(helper, ctx)
	if visible != nil && ctx.Err() == nil && (err != nil || len(info.GPUs) < len(visible)) {
		dismiss(helper)
		return startHost(ctx, node, nil, ask)
	}
	if err != nil {
		dismiss(helper)
		return nil, cuda.Info{}, err
	}
	return helper, info, nil
}
