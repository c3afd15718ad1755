// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"cmp"
	"context"
	"os"
	"path/filepath"

	bootapi "github.com/containerd/containerd/api/runtime/bootstrap/v1"
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/manager"
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/runc"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/operation/imagedir"
	"github.com/gpuckpt/gpuckpt/internal/recovery"
)

// Name is the name of the runtime in containerd.
const Name = "io.containerd.gpuckpt.v2"

// NewManager returns what starts and cleans up after this shim: runc's manager,
// which also removes what a shim that died left of a restore.
func NewManager() shim.Shim {
	return shimManager{manager.NewShimManager(Name)}
}

type shimManager struct{ shim.Shim }

// Start starts a shim, when what shims of the namespace that died have left is out of its way.
func (m shimManager) Start(ctx context.Context, params *bootapi.BootstrapParams) (*bootapi.BootstrapResult, error) {
	if node, err := config.Load(); err == nil { // else an operation says so
		recovery.SweepSilently(ctx, node, params.Namespace)
	}
	return m.Shim.Start(ctx, params)
}

// Stop cleans up after the shim of a container whose bundle is a neighbour of
// the working directory, as containerd calls it.
func (m shimManager) Stop(ctx context.Context, id string) (shim.StopStatus, error) {
	cwd, err := os.Getwd()
	if err != nil {
		return shim.StopStatus{}, err
	}
	namespace, err := namespaces.NamespaceRequired(ctx)
	if err != nil {
		return shim.StopStatus{}, err
	}
	bundle := filepath.Join(filepath.Dir(cwd), id)
	opts, err := runc.ReadOptions(bundle)
	if err != nil {
		log.G(ctx).WithError(err).Warn("read the runtime's options")
	}
	recovery.BeforeDelete(ctx, bundle, cmp.Or(opts.GetCriuWorkPath(), filepath.Join(bundle, "work")), host.RuncState(opts.GetRoot(), namespace, id))
	if _, err := imagedir.RemoveUnpacked(bundle); err != nil {
		log.G(ctx).WithError(err).Warn("remove the unpacked checkpoint")
	}
	status, err := m.Shim.Stop(ctx, id)
	recovery.AfterDelete(ctx, namespace, id)
	return status, err
}
