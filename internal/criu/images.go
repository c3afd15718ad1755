// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"fmt"
	"slices"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
)

// maxMounts bounds the mounts of a dump: the kernel's own bound for a namespace
// (fs.mount-max).
const maxMounts = 100_000

// Images reads the images of one dump, see package image. All errors are images.ErrDamaged or
// image.ErrRefused, but those of a file that cannot be opened.
type Images struct {
	*image.Set
	dir    string
	mounts []*mnt.MntEntry // once they were read
}

// Open returns a reader of the images in a directory, and of those files that are in pieces elsewhere. It reads nothing yet.
func Open(dir string, files ...images.File) *Images {
	return &Images{Set: image.Open(dir, files...), dir: dir}
}

// Mounts returns the paths in the container at which a dump had something mounted
// from outside: the bind mounts of the container's spec, which CRIU calls external
// and knows by a key. The paths are sorted, each once; there are none in a directory
// without images.
func (im *Images) Mounts() ([]string, error) {
	mounts, err := im.allMounts()
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, m := range mounts {
		paths = append(paths, m.GetExtKey())
	}
	return sortedSet(paths), nil
}

// allMounts reads the mounts of all mount namespaces of the dump, once.
func (im *Images) allMounts() ([]*mnt.MntEntry, error) {
	if im.mounts != nil {
		return im.mounts, nil
	}
	err := image.EachOf(im.Set, "mountpoints-*.img", func(m *mnt.MntEntry) error {
		if len(im.mounts) == maxMounts {
			return fmt.Errorf("%w: more than %d mounts in %s", images.ErrDamaged, maxMounts, im.dir)
		}
		im.mounts = append(im.mounts, m)
		return nil
	})
	if err != nil {
		im.mounts = nil
	}
	return im.mounts, err
}

// Files returns the regular files that the processes of a dump have open or
// mapped, by their paths in the container. The paths are sorted, each once; there
// are none in a directory without images.
func (im *Images) Files() ([]string, error) {
	if !im.Has("files.img") {
		return nil, nil
	}
	var paths []string
	err := image.EachOf(im.Set, "files.img", func(f *fdinfo.FileEntry) error {
		paths = append(paths, f.GetReg().GetName())
		return nil
	})
	if err != nil {
		return nil, err
	}
	return sortedSet(paths), nil
}

// sortedSet returns the paths that are not empty, sorted, each once.
func sortedSet(paths []string) []string {
	slices.Sort(paths)
	return slices.DeleteFunc(slices.Compact(paths), func(p string) bool { return p == "" })
}

// one reads an image that has one entry.
func one[M proto.Message](im *Images, name string) (entry M, err error) {
	err = image.EachOf(im.Set, name, func(m M) error {
		entry = m
		return nil
	})
	return entry, err
}
