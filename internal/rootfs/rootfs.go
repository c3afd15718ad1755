// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package rootfs finds where the files of a container can be read before anything is
// mounted for it: Of looks at the mounts of a Create request, and Visit calls a function
// with the directories, which it mounts for as long if they can be read in no other way.
package rootfs

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/v2/core/mount"
)

// Rootfs is where a container's files can be read before they are mounted.
type Rootfs struct {
	// Dirs are directories, the topmost layer first; nil when mounts have to
	// be mounted first.
	Dirs   []string
	mounts []mount.Mount
}

// Of finds the layers of an overlay, or the one directory of a bind
// mount; root is the spec's, for a request without mounts.
func Of(r *taskAPI.CreateTaskRequest, root string) Rootfs {
	switch len(r.Rootfs) {
	case 0:
		if !filepath.IsAbs(root) {
			root = filepath.Join(r.Bundle, root)
		}
		return Rootfs{Dirs: []string{root}}
	case 1:
		switch m := r.Rootfs[0]; m.Type {
		case "overlay":
			if lower := lowerDirs(m.Options); lower != nil {
				return Rootfs{Dirs: lower}
			}
		case "bind", "rbind":
			return Rootfs{Dirs: []string{m.Source}}
		}
	}
	return Rootfs{mounts: mounts(r.Rootfs)}
}

// lowerDirs returns the layers of an overlay, the topmost first; nil when they are
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

// Visit calls do with directories, mounted read-only for as long where need be.
func (f Rootfs) Visit(ctx context.Context, do func(roots []string) error) error {
	if f.Dirs != nil {
		return do(f.Dirs)
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
