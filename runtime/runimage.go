// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"errors"
	"path/filepath"
	"slices"

	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/guard/trust"
	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
)

// Running a checkpoint image restores it: a Create without a checkpoint looks for one
// in the container's root file system. If there is one, and the node's policy has
// nothing against it, the container is created from it, and Start restores it as any
// other. The image's layers are only ever read, so a container that ended is restored
// from the image again when it is started again.

// inImage makes the container one that is restored, if its image is a checkpoint and the policy allows it, and
// calls do in any case, while the image can be read. A container of another image costs an lstat for each layer.
func (k *creating) inImage(ctx context.Context, do func(context.Context) error) error {
	if k.afresh {
		return do(ctx)
	}
	rootfs := bundle.RootfsOf(k.c.bundle, k.r.Rootfs, k.spec.Spec)
	if rootfs.NeedsMount() && !config.AsksForRestore(k.c.annotations) {
		// To look costs a mount, which is not for every container's start.
		view, err := k.c.config()
		if err != nil || view.Restore.Policy != config.Always {
			return do(ctx) // a container that is none of ours starts whatever the configuration says
		}
	}
	k.restores = true // if that fails
	return rootfs.Visit(ctx, func(roots []string) error {
		var err error
		if k.afresh, err = k.c.lookInto(ctx, roots, rootfs.NeedsMount()); err != nil {
			return err
		}
		k.restores = k.c.restore != nil
		return do(ctx)
	})
}

// lookInto looks for a checkpoint in an image's layers, and reports whether there is one that is not to be
// restored. mounts says that they are mounted for as long as that takes.
func (c *container) lookInto(ctx context.Context, roots []string, mounts bool) (afresh bool, err error) {
	dirs, err := images.ImageDirs(roots...)
	if err != nil {
		return false, err
	}
	if len(dirs) == 0 {
		if config.AsksForRestore(c.annotations) { // of a pod's containers all have its annotations
			log.G(ctx).Infof("annotation %s asks for a restore, and the image is no checkpoint: it starts afresh", annotations.Restore)
		}
		return false, nil
	}
	rest := trust.Rest{Mounted: mounts}
	blobs := bundle.Blobs(c.bundle)
	found, source, reason, err := trust.OpenImage(ctx, c.config, blobs, dirs, roots, &rest)
	if err != nil {
		rest.Close()
		return false, err
	}
	entry := log.G(ctx).WithField("checkpoint", dirs[0])
	if reason != "" {
		entry.Infof("the image is a checkpoint and starts afresh: %s", reason)
		return true, nil
	}
	c.restore = &restoreState{dir: found.Dir, blobs: blobs, checkpoint: found, arriving: source, rest: rest}
	if mounts {
		// By Start runc's service has mounted the root file system.
		c.restore.mounted = filepath.Join(c.bundle, "rootfs")
		c.restore.dir = filepath.Join(c.restore.mounted, images.ImageDir)
	}
	entry.Info("the image is a checkpoint and is restored")
	return false, nil
}

// admit refuses a checkpoint that the client names, if the node's policy does not let it in.
func (r *restoreState) admit(ctx context.Context, read config.Source) error {
	return trust.Admit(ctx, read, r.dir, &r.rest)
}

// open returns the checkpoint that a container is restored from; nil for one
// without GPU state. It is read once.
func (r *restoreState) open() (*images.Checkpoint, error) {
	if r.checkpoint == nil {
		found, err := images.Open(r.dir)
		if errors.Is(err, images.ErrNoMetadata) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		r.checkpoint = found
	}
	if len(r.checkpoint.Metadata.Processes) == 0 {
		return nil, nil // an image of a container without GPU state
	}
	return r.checkpoint, nil
}

// images returns the directory in which CRIU's images can be read now.
func (r *restoreState) images() string {
	if r.checkpoint != nil && r.checkpoint.Dir != "" {
		return r.checkpoint.Dir
	}
	return r.dir
}

// reopen opens the checkpoint again where it lies now, if Create has looked at it by
// way of a temporary mount.
func (r *restoreState) reopen() error {
	if r.mounted == "" {
		return nil
	}
	found, err := images.OpenImage(r.blobs, r.mounted)
	if err != nil {
		return err
	}
	r.checkpoint, r.mounted = found, ""
	r.dumped = r.read()
	return nil
}

// inPieces reports whether memory is in blobs.
func (r *restoreState) inPieces() bool {
	return r.checkpoint != nil && slices.ContainsFunc(r.checkpoint.Files, func(f images.File) bool { return f.Pieces != nil })
}

// read returns a reader of CRIU's images, where they are now.
func (r *restoreState) read() *criu.Images {
	if r.checkpoint == nil {
		return criu.Open(r.dir)
	}
	return criu.Open(r.images(), r.checkpoint.Files...)
}
