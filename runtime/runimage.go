// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/log"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/internal/config"
)

// Running a checkpoint image restores it: a Create without a checkpoint looks for one
// in the container's root file system. If there is one, and the node's policy has
// nothing against it, the container is created from it, and Start restores it as any
// other. The image's layers are only ever read, so a container that ended is restored
// from the image again when it is started again.

// restoreFromImage makes the container one that is restored, and r a request for it,
// and fits it, if its image is a checkpoint and the policy allows it. Else it does
// nothing, and restore stays nil. A container of another image costs an lstat for each
// layer.
func (c *container) restoreFromImage(ctx context.Context, r *taskAPI.CreateTaskRequest, spec *specs.Spec) error {
	root := ""
	if len(r.Rootfs) == 0 {
		if spec.Root == nil {
			return nil
		}
		root = spec.Root.Path
	}
	look := rootfsOf(r, root)
	if look.roots == nil && !config.AsksForRestore(c.annotations) {
		// To look costs a mount, which is not for every container's start.
		view, err := c.config()
		if err != nil || view.Restore.Policy != config.Always {
			return nil // a container that is none of ours starts whatever the configuration says
		}
	}
	return look.visit(ctx, func(roots []string) error {
		dirs, err := images.ImageDirs(roots...)
		if err != nil || len(dirs) == 0 {
			if err == nil && config.AsksForRestore(c.annotations) {
				// Of a pod's containers all have its annotations.
				log.G(ctx).WithField("id", c.id).Infof("annotation %s asks for a restore, and the image is no checkpoint: it starts afresh", annotations.Restore)
			}
			return err
		}
		view, err := c.config()
		if err != nil {
			return err
		}
		reason, err := view.StartsAfresh()
		if err != nil {
			return err
		}
		entry := log.G(ctx).WithFields(log.Fields{"id": c.id, "checkpoint": dirs[0]})
		if reason != "" {
			entry.Infof("the image is a checkpoint and starts afresh: %s", reason)
			return nil
		}
		found, err := images.OpenImage(roots...)
		if err != nil {
			return err
		}
		c.restore = &restoreState{dir: found.Dir, checkpoint: found}
		if look.roots == nil {
			// By Start runc's service has mounted the root file system.
			c.restore.dir = filepath.Join(r.Bundle, "rootfs", images.ImageDir)
			c.restore.mounted = filepath.Join(r.Bundle, "rootfs")
		}
		r.Checkpoint = c.restore.dir
		entry.Info("the image is a checkpoint and is restored")
		return c.fit(ctx, spec) // while it can be read
	})
}

// rootfs is where a container's files can be looked at before they are mounted.
type rootfs struct {
	// roots are directories, the topmost layer first; nil when mounts have to
	// be mounted first.
	roots  []string
	mounts []mount.Mount
}

// rootfsOf finds the layers of an overlay, or the one directory of a bind
// mount; root is the spec's, for a request without mounts.
func rootfsOf(r *taskAPI.CreateTaskRequest, root string) rootfs {
	switch len(r.Rootfs) {
	case 0:
		if !filepath.IsAbs(root) {
			root = filepath.Join(r.Bundle, root)
		}
		return rootfs{roots: []string{root}}
	case 1:
		switch m := r.Rootfs[0]; m.Type {
		case "overlay":
			if lower := lowerDirs(m.Options); lower != nil {
				return rootfs{roots: lower}
			}
		case "bind", "rbind":
			return rootfs{roots: []string{m.Source}}
		}
	}
	return rootfs{mounts: mounts(r.Rootfs)}
}

// lowerDirs gives the layers of an overlay, the topmost first; nil when they are
// not written in a way that is known here. The container's own writable layer
// is not among them: what it did there does not change the image.
func lowerDirs(options []string) (dirs []string) {
	for _, o := range options {
		list, ok := strings.CutPrefix(o, "lowerdir=")
		if !ok {
			if strings.HasPrefix(o, "lowerdir") || strings.HasPrefix(o, "datadir") {
				return nil
			}
			continue
		}
		if strings.Contains(list, `\`) || strings.Contains(list, "::") {
			return nil
		}
		for dir := range strings.SplitSeq(list, ":") {
			if !filepath.IsAbs(dir) {
				return nil
			}
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

func mounts(list []*types.Mount) (all []mount.Mount) {
	for _, m := range list {
		all = append(all, mount.Mount{Type: m.Type, Source: m.Source, Target: m.Target, Options: m.Options})
	}
	return all
}

// visit calls do with directories, mounted read-only for as long where need be.
func (f rootfs) visit(ctx context.Context, do func(roots []string) error) error {
	if f.roots != nil {
		return do(f.roots)
	}
	var done error
	err := mount.WithReadonlyTempMount(ctx, f.mounts, func(root string) error {
		done = do([]string{root})
		return nil
	})
	if done != nil {
		return done
	}
	if err != nil {
		return fmt.Errorf("look for a checkpoint in the image: %w", err)
	}
	return nil
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
	found, err := images.OpenImage(r.mounted)
	if err != nil {
		return err
	}
	r.checkpoint, r.mounted = found, ""
	return nil
}
