// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"path"
	"strings"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/criu/tmpfs"
	"github.com/gpuckpt/gpuckpt/internal/guard/admission"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// contents compares what is in the tmpfs mounts of a dump.
func contents(from *criu.Images, d *criu.Dump, with *admission.Entries) error {
	if image.Without("content of tmpfs") {
		return nil
	}
	return eachInTmpfs(from, d.Mounts, with.Content)
}

// eachInTmpfs calls do for each file in the tmpfs mounts of a dump, as tmpfs.Walk does, with its path in the container.
func eachInTmpfs(from *criu.Images, mounts []*mnt.MntEntry, do func(file string, mode, uid, gid uint32) error) error {
	for _, m := range mounts {
		name := fmt.Sprintf("tmpfs-dev-%d.tar.gz.img", m.GetRootDev())
		if mnt.Fstype(m.GetFstype()) != mnt.Fstype_TMPFS || m.GetRoot() != "/" || !from.Has(name) {
			continue
		}
		if err := eachInImage(from, name, m.GetMountpoint(), do); err != nil {
			return err
		}
	}
	return nil
}

func eachInImage(from *criu.Images, image, at string, do func(file string, mode, uid, gid uint32) error) error {
	f, err := from.OpenFile(image)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := tmpfs.Walk(f, func(file string, mode, uid, gid uint32) error { return do(path.Join(at, file), mode, uid, gid) }); err != nil {
		return fmt.Errorf("%s: %w", image, err)
	}
	return nil
}

// paths looks at the paths of a container's files before the container is there. CRIU opens files by
// the names that the kernel gave it: there is no symbolic link in them. A link that an image brings
// could lead CRIU, which is root, to what another process of the host has.
type paths struct {
	rootfs string
	binds  map[string]string // sources by destinations
	ro     map[string]bool   // destinations that nothing may be written to
	dirs   map[string]error  // directories that were looked at
}

func newPaths(spec *specs.Spec, rootfs string) *paths {
	p := &paths{rootfs, make(map[string]string), make(map[string]bool), make(map[string]error)}
	p.ro["/"] = spec.Root != nil && spec.Root.Readonly
	for _, m := range spec.Mounts {
		source, at := "", path.Clean("/"+m.Destination)
		p.ro[at] = false // also where another mount is below it
		for _, o := range m.Options {
			switch o {
			case "bind", "rbind":
				source = m.Source
			case "ro", "rro":
				p.ro[at] = true
			case "rw":
				p.ro[at] = false
			}
		}
		if m.Type == "bind" {
			source = m.Source
		}
		p.binds[at] = source // "" for a file system that is not there yet
	}
	return p
}

// mountOf returns the destination of the mount that a path of the container is on, "/" for the root.
func (p *paths) mountOf(name string) string {
	found := "/"
	for at := range p.binds {
		if len(at) > len(found) && strings.HasPrefix(name, at) && (len(name) == len(at) || name[len(at)] == '/') {
			found = at
		}
	}
	return found
}

// within returns the directory of this machine that a path of the container is below, and the rest of the
// path. It is "" for a file system that is not there yet.
func (p *paths) within(name string) (root, rest string) {
	if at := p.mountOf(name); at != "/" {
		return p.binds[at], strings.TrimPrefix(name, at)
	}
	return p.rootfs, name
}

// direct refuses a path with a symbolic link on its way, in the root file system and in what is
// bound into the container.
func (p *paths) direct(name string) error {
	dir := path.Dir(name)
	err, known := p.dirs[dir]
	if !known {
		err = p.look(dir)
		p.dirs[dir] = err
	}
	return err
}

func (p *paths) look(dir string) error {
	root, rest := p.within(dir)
	if root == "" {
		return nil
	}
	fd, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return nil // a file that is bound, or none: CRIU says so
	}
	if err != nil {
		return fmt.Errorf("look at %s: %w", root, err)
	}
	defer unix.Close(fd)
	found, err := proc.Openat2(fd, "./"+rest, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	switch {
	case err == nil:
		unix.Close(found)
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
		return fmt.Errorf("there is a symbolic link on the way to it: its directory was replaced; close it before the checkpoint")
	}
	return nil
}
