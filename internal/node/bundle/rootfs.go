// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/images"
)

// Rootfs is where a container's files can be looked at before they are mounted.
type Rootfs struct {
	// roots are directories, the topmost layer first; nil: mounts must be mounted first.
	roots  []string
	mounts []mount.Mount
}

// RootfsOf finds the layers of an overlay, or the one directory of a bind mount, among the mounts
// of a Create request. Without mounts the root is the spec's.
func RootfsOf(dir string, mounts []*types.Mount, spec *specs.Spec) Rootfs {
	switch len(mounts) {
	case 0:
		return Rootfs{roots: []string{RootOf(dir, spec)}}
	case 1:
		switch m := mounts[0]; m.Type {
		case "overlay":
			if lower := lowerDirs(m.Options); lower != nil {
				return Rootfs{roots: lower}
			}
		case "bind", "rbind":
			return Rootfs{roots: []string{m.Source}}
		}
	}
	var f Rootfs
	for _, m := range mounts {
		f.mounts = append(f.mounts, mount.Mount{Type: m.Type, Source: m.Source, Target: m.Target, Options: m.Options})
	}
	return f
}

// lowerDirs returns the layers of an overlay, the topmost first, without the container's own: what
// it did does not change the image. nil: they are not written in a way that is known here.
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

// NeedsMount reports whether Visit must mount the root file system.
func (f Rootfs) NeedsMount() bool { return f.roots == nil }

// Visit calls do with the directories, the topmost layer first. Where there are none it
// mounts the root file system read-only for as long.
func (f Rootfs) Visit(ctx context.Context, do func(roots []string) error) error {
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

// WithoutCheckpoint returns the mounts of a Create request without the layers of an overlay that
// have nothing but the image's checkpoint: the container has no use for it, and its files hold all
// memory of a program. Other mounts, and layers with more in them, stay as they are.
func WithoutCheckpoint(mounts []*types.Mount) []*types.Mount {
	if len(mounts) != 1 || mounts[0].Type != "overlay" {
		return mounts
	}
	all := lowerDirs(mounts[0].Options)
	kept := slices.DeleteFunc(slices.Clone(all), onlyCheckpoint)
	if len(kept) == 0 || len(kept) == len(all) {
		return mounts
	}
	m := &types.Mount{Type: "overlay", Source: mounts[0].Source, Target: mounts[0].Target}
	upper := false
	for _, o := range mounts[0].Options {
		upper = upper || strings.HasPrefix(o, "upperdir=")
		if !strings.HasPrefix(o, "lowerdir=") {
			m.Options = append(m.Options, o)
		}
	}
	m.Options = append(m.Options, "lowerdir="+strings.Join(kept, ":"))
	if len(kept) == 1 && !upper { // no overlay is of one layer alone
		m.Type, m.Source, m.Options = "bind", kept[0], []string{"ro", "rbind"}
	}
	return []*types.Mount{m}
}

// onlyCheckpoint reports whether a layer has a checkpoint's directory and nothing else. It reads two names of any number,
// of any container's image.
func onlyCheckpoint(dir string) bool {
	d, err := os.Open(dir)
	if err != nil {
		return false
	}
	defer d.Close()
	entries, err := d.ReadDir(2)
	return err == nil && len(entries) == 1 && entries[0].Name() == images.ImageDir && entries[0].IsDir()
}

// Blobs returns the directory of containerd's blobs, as images.OpenImage wants it: in containerd's root directory, which a
// bundle has a link into (NewBundle of containerd's core/runtime/v2: "work" leads to ROOT/PLUGIN/NAMESPACE/ID). "" if
// the bundle is not containerd's.
func Blobs(dir string) string {
	work, err := os.Readlink(filepath.Join(dir, "work"))
	if err != nil || !filepath.IsAbs(work) {
		return ""
	}
	return filepath.Join(work, "../../..", "io.containerd.content.v1.content/blobs/sha256")
}
