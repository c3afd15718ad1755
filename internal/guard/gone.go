// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	ghostfile "github.com/checkpoint-restore/go-criu/v8/crit/images/ghost-file"
	remap "github.com/checkpoint-restore/go-criu/v8/crit/images/remap-file-path"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/criu/tmpfs"
	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
)

// removedSuffix is what a directory is called that was removed, behind the name that it had.
const removedSuffix = ".removed"

// longestGone is how long the name of a removed file may be: CRIU adds ".cr.N.ghost" while it makes the file.
const longestGone = unix.NAME_MAX - 18

// gone is a file that a dump has open and that was removed.
type gone struct {
	id   uint32
	name string
	made string // what CRIU adds to the name while it makes the file, which is nothing for a directory
}

// goneNames returns other names for files that a dump has open and that were removed, by their numbers.
// CRIU makes a directory by the name that it had, and removes it again: it would take what has that name
// now for it. It makes another file in the directory that had it, which may be none any more, or one that was
// removed itself, and with a longer name.
func goneNames(spec *specs.Spec, dumped *criu.Images, rootfs string) (map[uint32]string, error) {
	all, err := goneFiles(dumped.Set)
	if err != nil || len(all) == 0 {
		return nil, err
	}
	goneDirs := make(map[string]bool)
	for _, g := range all {
		if g.made == "" {
			goneDirs[g.name] = true
		}
	}
	spec, _ = bundle.AtPlaces(spec, rootfs)
	places, names := newPaths(spec, rootfs), make(map[uint32]string)
	shm := dumped.Has(tmpfs.ShmImage) && tmpfs.Carries(spec)
	if shm {
		places.binds[tmpfs.ShmPath] = ""
	}
	var at []string
	for _, g := range all {
		if len(goneDirs) > 0 {
			names[g.id] = outside(goneDirs, g.name, g.id)
		} else {
			names[g.id] = g.name
		}
		if dir, base := path.Split(names[g.id]); g.made != "" && len(base) > longestGone {
			names[g.id] = fmt.Sprintf("%s%s.%x%s", dir, base[:longestGone/2], g.id, removedSuffix)
		}
		at = append(at, names[g.id])
	}
	blocked, err := besideFiles(dumped, at, shm)
	if err != nil {
		return nil, err
	}
	for _, g := range all {
		name := names[g.id]
		if name, err = places.free(cmp.Or(blocked[name], name), g.made, g.id); err != nil {
			return nil, err
		}
		if names[g.id] = name; name == g.name {
			delete(names, g.id)
		}
	}
	return names, nil
}

// goneFiles returns the files that were removed and that CRIU makes anew.
func goneFiles(dumped *image.Set) (all []gone, err error) {
	if !dumped.Has("remap-fpath.img") {
		return nil, nil
	}
	removed := make(map[uint32]gone)
	err = image.EachOf(dumped, "remap-fpath.img", func(m *remap.RemapFilePathEntry) error {
		if m.GetRemapType() != remap.RemapType_GHOST {
			return nil
		}
		is, err := isGoneDir(dumped, m.GetRemapId())
		made := ""
		if !is {
			made = fmt.Sprintf(".cr.%x.ghost", m.GetRemapId())
		}
		removed[m.GetOrigId()] = gone{m.GetOrigId(), "", made}
		return err
	})
	if err != nil {
		return nil, err
	}
	err = image.EachOf(dumped, "files.img", func(m *fdinfo.FileEntry) error {
		r := m.GetReg()
		if g, there := removed[r.GetId()]; r != nil && there {
			g.name = r.GetName()
			all = append(all, g)
		}
		return nil
	})
	return all, err
}

// besideFiles returns other names for those that lead through a file of a dump's tmpfs, as if the file were a
// directory: it has the place of one. What is in a tmpfs is not there yet, so the dump says it.
func besideFiles(dumped *criu.Images, names []string, shm bool) (map[string]string, error) {
	d, err := dumped.Dump()
	if err != nil {
		return nil, err
	}
	names = slices.Sorted(slices.Values(names))
	below := func(dir string) []string {
		from, _ := slices.BinarySearch(names, dir+"/")
		to := from
		for to < len(names) && strings.HasPrefix(names[to], dir+"/") {
			to++
		}
		return names[from:to]
	}
	through, taken := make(map[string]string), make(map[string]bool)
	look := func(file string, mode, _, _ uint32) error {
		if mode&unix.S_IFMT == unix.S_IFDIR {
			return nil
		}
		for _, name := range below(file) {
			through[name], taken[file] = file, true
		}
		like := file
		for strings.HasSuffix(like, removedSuffix) {
			like = strings.TrimSuffix(like, removedSuffix)
		}
		if like != file && len(below(like)) > 0 {
			taken[file] = true
		}
		return nil
	}
	if err = eachInTmpfs(dumped, d.Mounts, look); err == nil && shm {
		err = eachInImage(dumped, tmpfs.ShmImage, tmpfs.ShmPath, look)
	}
	for name, file := range through {
		to := file
		for taken[to] {
			to += removedSuffix
		}
		through[name] = to + name[len(file):]
	}
	return through, err
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
	err = image.EachOf(dumped, name, func(g *ghostfile.GhostFileEntry) error {
		is = g.GetMode()&unix.S_IFMT == unix.S_IFDIR
		return nil
	})
	return is, err
}

// free returns a name for what is made anew: the name itself, or one like it where something else has the name
// of a directory on the way, so that none can be made below it. made is what the name of a file has behind it while
// CRIU makes it, empty for a directory. Nothing may have this name, or that of a directory itself: in a file system
// that is not there yet, a directory gets another one. It is made in the last directory that is there: CRIU does
// not remove what it makes on the way to a directory.
// Each part of a path is looked at once: a tenant's has up to two thousand.
func (p *paths) free(name, made string, id uint32) (string, error) {
	if !path.IsAbs(name) || path.Clean(name) != name {
		return name, nil // which is refused later
	}
	dir, err := openDir(unix.AT_FDCWD, p.rootfs, 0)
	known := true // what is in it
	defer func() { closeDir(dir) }()
	above, last := path.Split(name)
	mount := 0 // how much of the path leads to a mount
	for end := len(above) - 1; made == "" && end > 0 && mount == 0; end = strings.LastIndexByte(above[:end], '/') {
		if _, is := p.binds[above[:end]]; is {
			mount = end
		}
	}
	at := make([]byte, 0, len(name)+len(removedSuffix))
	for part := range strings.FieldsFuncSeq(above, func(r rune) bool { return r == '/' }) {
		if err != nil {
			break
		}
		from, there := dir, len(at)
		at = append(append(at, '/'), part...)
		if source, mounted := p.binds[string(at)]; mounted {
			known = source != ""
			dir, err = openDir(unix.AT_FDCWD, source, 0)
		} else if dir, err = openDir(from, part, unix.O_NOFOLLOW); errors.Is(err, unix.ENOTDIR) {
			at = append(at, removedSuffix...)
			dir, err = openDir(from, part+removedSuffix, unix.O_NOFOLLOW)
		}
		if errors.Is(err, unix.ENOTDIR) {
			err = nil // a file that is mounted, or CRIU says so
		}
		if made == "" && err == nil && dir == -1 && len(at) > mount {
			last = fmt.Sprintf("%s.%x%s", last[:min(len(last), longestGone/2)], id, removedSuffix)
			dir, at, known = from, at[:there], true
			break
		}
		closeDir(from)
	}
	if made == "" && !known {
		last += removedSuffix
	}
	var st unix.Stat_t
	for err == nil && dir >= 0 {
		if err = unix.Fstatat(dir, last+made, &st, unix.AT_SYMLINK_NOFOLLOW); err == nil {
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
