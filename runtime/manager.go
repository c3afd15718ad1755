// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"cmp"
	"context"
	"os"
	"path/filepath"

	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/manager"
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/runc"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/host"
	"github.com/gpuckpt/gpuckpt/internal/imagedir"
	"github.com/gpuckpt/gpuckpt/internal/staging"
)

// Name is the name of the runtime in containerd.
const Name = "io.containerd.gpuckpt.v2"

// NewManager returns what starts and cleans up after this shim: runc's manager,
// which also removes what a shim that died left of a restore.
func NewManager() shim.Shim {
	return shimManager{manager.NewShimManager(Name)}
}

type shimManager struct{ shim.Shim }

// Stop cleans up after the shim of a container whose bundle is a neighbour of
// the working directory, as containerd calls it.
func (m shimManager) Stop(ctx context.Context, id string) (shim.StopStatus, error) {
	if cwd, err := os.Getwd(); err == nil {
		bundle := filepath.Join(filepath.Dir(cwd), id)
		warn := func(doing string, err error) {
			if err != nil {
				log.G(ctx).WithError(err).Warn(doing)
			}
		}
		warn("remove the spilled GPU state", staging.RemoveDeadSpill(bundle))
		warn("end the CRIU of a checkpoint", criu.EndOfDeadShim(bundle))
		warn("remove what a restore has left", removeDeadMounts(ctx, bundle, id))
		if dir, err := os.ReadFile(filepath.Join(bundle, restoreDirName)); err == nil && imagedir.IsTemporary(string(dir)) {
			warn("remove the unpacked checkpoint", os.RemoveAll(string(dir)))
		}
	}
	return m.Shim.Stop(ctx, id)
}

// removeDeadMounts is criu.RemoveMounts for a shim that died.
func removeDeadMounts(ctx context.Context, bundle, id string) error {
	namespace, err := namespaces.NamespaceRequired(ctx)
	if err != nil {
		return err
	}
	opts, err := runc.ReadOptions(bundle)
	if err != nil {
		return err
	}
	return criu.RemoveMounts(cmp.Or(opts.GetCriuWorkPath(), filepath.Join(bundle, "work")), host.RuncState(opts.GetRoot(), namespace, id))
}
