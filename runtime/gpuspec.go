// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/loopback"
	"github.com/gpuckpt/gpuckpt/internal/gpu/interposer"
	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/runtime/internal/devnode"
)

// fitSpec edits the spec before anything is created of it: GPUs that hooks would give
// are put into the spec, where CRIU and this shim see them, and in the spec of a
// restore the numbers of nodes become this node's. Most containers are left as they
// are.
func (c *container) fitSpec(ctx context.Context, view config.View, spec *specs.Spec) error {
	if err := c.injectGPUs(ctx, view.Node, spec); err != nil {
		return err
	}
	if err := interposer.Put(spec, view); err != nil {
		return err
	}
	cdi.ResolveMounts(spec)
	spec.Mounts = bundle.Uncovered(spec.Mounts)
	c.request = cdi.Read(spec)
	if c.restore == nil {
		return nil
	}
	c.restore.gpus.Spec = spec
	if err := loopback.Hook(spec); err != nil {
		return err
	}
	if err := devnode.Refresh(spec); err != nil {
		return refused(err)
	}
	return nil
}

// injectGPUs does what NVIDIA's container toolkit would do by hooks. A container for which
// that cannot be done starts with the hooks, but none is restored: CRIU knows nothing of
// what hooks mount.
func (c *container) injectGPUs(ctx context.Context, node config.Node, spec *specs.Spec) error {
	if spec.Hooks == nil && !c.toolkit {
		return nil
	}
	injected, err := cdi.InjectHooked(spec, c.toolkit, node.CDISpecDirs)
	switch {
	case err != nil && c.restore != nil:
		return refused(err)
	case err != nil:
		log.G(ctx).WithError(err).Warn("the container gets its GPUs by a hook, outside its spec: it cannot be checkpointed")
	case injected:
		log.G(ctx).WithField("gpus", cdi.Read(spec).String()).Info("GPUs put into the spec in place of a hook")
	}
	return nil
}

// rebindFiles mounts each driver file that the dump has mounted, and returns the paths
// at which CRIU mounts a node that the spec does not grant.
func rebindFiles(ctx context.Context, node config.Node, spec *specs.Spec, dump *criu.Images) (stray []string, err error) {
	mounted, err := dump.Mounts()
	if err != nil {
		return nil, err
	}
	concerns := func(path string) bool { return cdi.IsDriverFile(path) || cdi.IsNode(path) }
	if !slices.ContainsFunc(mounted, concerns) &&
		!slices.ContainsFunc(spec.Mounts, func(m specs.Mount) bool { return concerns(m.Destination) }) {
		return nil, nil
	}
	used, err := dump.Files()
	if err != nil {
		return nil, err
	}
	registry, err := cdi.Open(node.CDISpecDirs...)
	if err != nil {
		return nil, err
	}
	substituted, stray, err := cdi.Rebind(spec, mounted, used, registry.Files())
	if err != nil {
		return nil, refused(err)
	}
	for _, r := range substituted {
		log.G(ctx).WithFields(log.Fields{"path": r.Path, "from": r.Host}).Info("driver file mounted where the checkpoint had one")
	}
	return stray, nil
}

// refused adds the code of an error that the user must change something for.
func refused(err error) error { return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition) }
