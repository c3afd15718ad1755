// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package hostmemory says which memory of a container goes past CRIU in a checkpoint, by the node's
// configuration, and who pays for it.
package hostmemory

import (
	"context"
	"os"
	"path/filepath"

	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/pages"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/worker"
	"github.com/gpuckpt/gpuckpt/runtime/internal/charged"
)

// Container is what is checkpointed.
type Container struct {
	Bundle string
	Init   int // its first process
	Pids   func() ([]int, error)
	Run    worker.Run
}

// New returns the Dump of a container into a directory. If CRIU cannot be steered, or who copies would pay
// for images in memory out of a limit, CRIU dumps all, and the log says so. Close must be called.
func New(ctx context.Context, c Container, images string, read config.Source) *pages.Dump {
	of := pages.Dumping{Images: images, List: filepath.Join(c.Bundle, "gpuckpt-left-out.txt"), Init: c.Init, Pids: c.Pids}
	view, err := read()
	if err == nil {
		of.Library, err = library()
	}
	switch {
	case err != nil:
		log.G(ctx).WithError(err).Warn("CRIU dumps all memory")
	case view.Staging.MemoryLimit > 0 && staging.OnMemory(images):
		log.G(ctx).Info("CRIU dumps all memory: images on a tmpfs would count to memory_limit in [staging]")
	default:
		of.Least, of.Digest = view.LargeMemory(), view.Signing.Key != ""
	}
	of.Start = func() (*pages.Worker, error) {
		return charged.Start(ctx, c.Run, view.Staging, pages.StartWorker)
	}
	return pages.NewDump(ctx, of)
}

// library is what makes CRIU heed the list, too.
func library() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	return criu.FindPlugin(self)
}
