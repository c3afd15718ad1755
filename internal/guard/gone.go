// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"path"
	"strings"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	ghostfile "github.com/checkpoint-restore/go-criu/v8/crit/images/ghost-file"
	regfile "github.com/checkpoint-restore/go-criu/v8/crit/images/regfile"
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
// now for it. It makes another file in the directory that had it, which may be none any more, or one that was
// removed itself.
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
	var gone []*regfile.RegFileEntry
	goneDirs := make(map[string]bool)
	err = dumped.Each("files.img", func(e *image.Entry) error {
		m, ok := e.Message.(*fdinfo.FileEntry)
		r := m.GetReg()
		if is, there := isDir[r.GetId()]; ok && r != nil && there {
			gone = append(gone, r)
			if is {
				goneDirs[r.GetName()] = true
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	spec, _ = bundle.AtPlaces(spec, rootfs)
	places, names := newPaths(spec, rootfs), make(map[uint32]string)
	for _, r := range gone {
		name := r.GetName()
		if len(goneDirs) > 0 {
			name = outside(goneDirs, name, r.GetId())
		}
		if name, err = places.free(name, isDir[r.GetId()]); err != nil {
			return nil, err
		}
		if name != r.GetName() {
			names[r.GetId()] = name
		}
	}
	return names, nil
}

// outside returns a name beside the removed directory that a removed file was in: CRIU could not remove the
// directory again while it has files.
func outside(goneDirs map[string]bool, name string, id uint32) string {
	for end := 1; ; {
		next := strings.IndexByte(name[min(end, len(name)):], '/')
		if next < 0 {
			return name
		}
		if end += next; goneDirs[name[:end]] {
			return path.Join(path.Dir(name[:end]), fmt.Sprintf("%s.%x%s", path.Base(name), id, removedSuffix))
		}
		end++
	}
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

// free returns a name for what is made anew: the name itself, or one like it where something else has the name
// of a directory on the way, so that none can be made below it. Nothing may have the name of a directory itself: in
// a file system that is not there yet, it gets another one.
// Each part of a path is looked at once: a tenant's has up to two thousand.
func (p *paths) free(name string, isDir bool) (string, error) {
	if !path.IsAbs(name) || path.Clean(name) != name {
		return name, nil // which is refused later
	}
	dir, err := openDir(unix.AT_FDCWD, p.rootfs, 0)
	known := true // what is in it
	defer func() { closeDir(dir) }()
	above, last := path.Split(name)
	at := make([]byte, 0, len(name)+len(removedSuffix))
	for part := range strings.FieldsFuncSeq(above, func(r rune) bool { return r == '/' }) {
		if err != nil {
			break
		}
		at = append(append(at, '/'), part...)
		from := dir
		if source, mounted := p.binds[string(at)]; mounted {
			known = source != ""
			dir, err = openDir(unix.AT_FDCWD, source, 0)
		} else if dir, err = openDir(from, part, unix.O_NOFOLLOW); errors.Is(err, unix.ENOTDIR) {
			at = append(at, removedSuffix...)
			dir, err = openDir(from, part+removedSuffix, unix.O_NOFOLLOW)
		}
		closeDir(from)
		if errors.Is(err, unix.ENOTDIR) {
			err = nil // a file that is mounted, or CRIU says so
		}
	}
	if isDir && !known {
		last += removedSuffix
	}
	var st unix.Stat_t
	for err == nil && isDir && dir >= 0 {
		if err = unix.Fstatat(dir, last, &st, unix.AT_SYMLINK_NOFOLLOW); err == nil {
			last += removedSuffix
		}
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return "", fmt.Errorf("look for a name like %s: %w", name, err)
	}
	return string(at) + "/" + last, nil
}

// openDir opens a directory. It returns -1 for one that is not there or below none, and for a file system that is
// not there yet: what is in that is not known.
func openDir(at int, name string, flags int) (int, error) {
	if at == -1 || name == "" {
		return -1, nil
	}
	fd, err := unix.Openat(at, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC|flags, 0)
	if errors.Is(err, unix.ENOENT) {
		return -1, nil
	}
	return fd, err
}

func closeDir(fd int) {
	if fd >= 0 {
		unix.Close(fd)
	}
}
