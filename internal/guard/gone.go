// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	ghostfile "github.com/checkpoint-restore/go-criu/v8/crit/images/ghost-file"
	remap "github.com/checkpoint-restore/go-criu/v8/crit/images/remap-file-path"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
)

// removedSuffix is what a directory is called that was removed, behind the name that it had.
const removedSuffix = ".removed"

// goneNames returns other names for files that a dump has open and that were removed, by their numbers.
// CRIU makes a directory by the name that it had, and removes it again: it would take what has that name
// now for it. It makes another file in the directory that had it, which may be none any more.
func goneNames(spec *specs.Spec, dumped *image.Set, rootfs string) (map[uint32]string, error) {
	if !dumped.Has("remap-fpath.img") {
		return nil, nil
	}
	isDir := make(map[uint32]bool)
	err := dumped.Each("remap-fpath.img", func(e *image.Entry) error {
		m, ok := e.Message.(*remap.RemapFilePathEntry)
		if !ok || m.GetRemapType() != remap.RemapType_GHOST {
			return nil
		}
		is, err := isGoneDir(dumped, m.GetRemapId())
		isDir[m.GetOrigId()] = is
		return err
	})
	if err != nil {
		return nil, err
	}
	spec, _ = bundle.AtPlaces(spec, rootfs)
	places, names := newPaths(spec, rootfs), make(map[uint32]string)
	err = dumped.Each("files.img", func(e *image.Entry) error {
		m, ok := e.Message.(*fdinfo.FileEntry)
		r := m.GetReg()
		is, gone := isDir[r.GetId()]
		if !ok || r == nil || !gone {
			return nil
		}
		name, err := places.freeDir(path.Dir(r.GetName()))
		if err != nil {
			return err
		}
		if name = path.Join(name, path.Base(r.GetName())); is {
			name, err = places.free(name)
		}
		if name != r.GetName() {
			names[r.GetId()] = name
		}
		return err
	})
	return names, err
}

func isGoneDir(dumped *image.Set, id uint32) (is bool, err error) {
	name := fmt.Sprintf("ghost-file-%x.img", id)
	if !dumped.Has(name) {
		return false, nil // which CRIU says
	}
	err = dumped.Each(name, func(e *image.Entry) error {
		if g, ok := e.Message.(*ghostfile.GhostFileEntry); ok {
			is = g.GetMode()&unix.S_IFMT == unix.S_IFDIR
		}
		return nil
	})
	return is, err
}

// free returns a name that nothing has: the name itself, or one like it.
func (p *paths) free(name string) (string, error) {
	for {
		st, known, err := p.lstat(name)
		if err != nil || known && st == nil {
			return name, err
		}
		if name += removedSuffix; !known || len(name) > unix.PathMax {
			return name, nil
		}
	}
}

// freeDir returns the name of a directory, or one like it where something else has that name, and so no
// directory can be made below it.
func (p *paths) freeDir(name string) (string, error) {
	if name == "/" {
		return name, nil
	}
	above, err := p.freeDir(path.Dir(name))
	if err != nil {
		return "", err
	}
	name = path.Join(above, path.Base(name))
	st, _, err := p.lstat(name)
	if err == nil && st != nil && !st.IsDir() {
		return name + removedSuffix, nil
	}
	return name, err
}

// lstat looks at a path of the container. It is not known what is in a file system that is not there yet.
func (p *paths) lstat(name string) (st fs.FileInfo, known bool, err error) {
	root, rest := p.within(name)
	if root == "" {
		return nil, false, nil
	}
	within, err := os.OpenRoot(root)
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, fs.ErrNotExist) {
		return nil, true, nil // a file that is mounted, or a mount that CRIU says is missing
	}
	if err != nil {
		return nil, false, err
	}
	defer within.Close()
	st, err = within.Lstat(cmp.Or(path.Join(".", rest), "."))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil, true, nil
	}
	return st, true, err
}
