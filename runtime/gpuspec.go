// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/pelletier/go-toml/v2"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/internal/config"
	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/host"
	"github.com/gpuckpt/gpuckpt/internal/nodes"
)

// fitSpec edits the spec before anything is created of it: GPUs that hooks would give
// are put into the spec, where CRIU and this shim see them, and in the spec of a
// restore the numbers of nodes become this node's. Most containers are left as they
// are.
func (k *creating) fitSpec(ctx context.Context) error {
	view, err := k.c.config()
	if err != nil {
		if k.c.restore == nil {
			return nil // a container that may never be checkpointed starts all the same
		}
		return err
	}
	if err := k.injectGPUs(ctx, view.Node); err != nil {
		return err
	}
	k.c.request = cdi.Read(k.spec)
	if k.c.restore == nil {
		return nil
	}
	k.c.restore.gpus.Spec = k.spec
	host.HookLoopback(k.spec)
	if err := nodes.Refresh(k.spec); err != nil {
		return refused(err)
	}
	return nil
}

// fitFiles edits the spec of a restore whose GPUs have been found to fit: the driver's
// files are mounted where the dump has them.
func (k *creating) fitFiles(ctx context.Context, dump *criu.Images) error {
	view, err := k.c.config()
	if err != nil {
		return err
	}
	if k.spec.Linux != nil {
		k.c.restore.gpus.Devices = slices.Clone(k.spec.Linux.Devices)
	}
	return k.rebindFiles(ctx, view.Node, dump)
}

// injectGPUs does what NVIDIA's container toolkit would do by hooks. Where that
// cannot be done a container starts with them, but none is restored: CRIU
// knows nothing of what they mount.
func (k *creating) injectGPUs(ctx context.Context, node config.Node) error {
	if k.spec.Hooks == nil && !k.c.toolkit {
		return nil
	}
	injected, err := k.inject(node)
	entry := log.G(ctx)
	switch {
	case err != nil && k.c.restore != nil:
		return refused(err)
	case err != nil:
		entry.WithError(err).Warn("the container gets its GPUs by a hook, outside its spec: it cannot be checkpointed")
	case injected:
		entry.WithField("gpus", cdi.Read(k.spec).String()).Info("GPUs put into the spec in place of a hook")
	}
	return nil
}

// inject is injectGPUs without its judgement of errors.
func (k *creating) inject(node config.Node) (bool, error) {
	registry, err := cdi.Open(node.CDISpecDirs...)
	if err != nil {
		return false, err
	}
	toolkit, err := readToolkit(toolkitConfig)
	if err != nil {
		return false, err
	}
	toolkit.Runtime = k.c.toolkit
	return registry.Inject(k.spec, toolkit)
}

// toolkitConfig is the configuration of NVIDIA's container toolkit.
const toolkitConfig = "/etc/nvidia-container-runtime/config.toml"

// readToolkit reads what that says about whom to believe. The defaults are the
// toolkit's own. Of a file that cannot be understood nothing is believed.
func readToolkit(path string) (cdi.Toolkit, error) {
	file := struct {
		Variable bool `toml:"accept-nvidia-visible-devices-envvar-when-unprivileged"`
		Mounts   bool `toml:"accept-nvidia-visible-devices-as-volume-mounts"`
	}{Variable: true}
	data, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return cdi.Toolkit{}, fmt.Errorf("read the NVIDIA container toolkit's configuration: %w", err)
	}
	if err := toml.Unmarshal(data, &file); err != nil {
		return cdi.Toolkit{}, fmt.Errorf("read the NVIDIA container toolkit's configuration %s: %w", path, err)
	}
	return cdi.Toolkit{Variable: file.Variable, Mounts: file.Mounts}, nil
}

// rebindFiles sees to it that there is a mount for each that the dump has.
func (k *creating) rebindFiles(ctx context.Context, node config.Node, dump *criu.Images) error {
	mounted, err := dump.Mounts()
	if err != nil {
		return err
	}
	concerns := func(path string) bool { return cdi.IsDriverFile(path) || cdi.IsNode(path) }
	if !slices.ContainsFunc(mounted, concerns) &&
		!slices.ContainsFunc(k.spec.Mounts, func(m specs.Mount) bool { return concerns(m.Destination) }) {
		return nil
	}
	used, err := dump.Files()
	if err != nil {
		return err
	}
	registry, err := cdi.Open(node.CDISpecDirs...)
	if err != nil {
		return err
	}
	substituted, stray, err := cdi.Rebind(k.spec, mounted, used, registry.Files())
	if err != nil {
		return refused(err)
	}
	for _, r := range substituted {
		log.G(ctx).WithFields(log.Fields{"path": r.Path, "from": r.Host}).Info("driver file mounted where the checkpoint had one")
	}
	k.c.restore.gpus.Stray = stray
	return nil
}

// refused adds the code of an error that the user must change something for.
func refused(err error) error { return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition) }
