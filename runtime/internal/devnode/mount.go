// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package devnode

import (
	"errors"
	"fmt"
	"path"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// openFromRoot opens a directory by its path from the thread's root.
func openFromRoot(dir string) (int, error) {
	root, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(root)
	return openBeneath(root, strings.TrimPrefix(path.Clean(dir), "/"))
}

// tree is a mount that is not attached anywhere.
type tree struct {
	at   string // where it is to be
	fd   int
	mask bool // whether there must be something
}

// flagsOf returns the options of a mount of the spec that bar something (mount_setattr(2)).
func flagsOf(m specs.Mount) (flags uint64) {
	attributes := map[string]uint64{
		"ro": unix.MOUNT_ATTR_RDONLY, "nosuid": unix.MOUNT_ATTR_NOSUID, "nodev": unix.MOUNT_ATTR_NODEV, "noexec": unix.MOUNT_ATTR_NOEXEC,
	}
	for _, option := range bundle.Bars(m) {
		flags |= attributes[option]
	}
	return flags
}

// Types of mounts that mask a path, where there is one: with /dev/null, and a directory as emptyDirectory.
const (
	mask           = "mask"
	emptyDirectory = "tmpfs"
)

// emptyTree makes a tree that masks a directory, as runc does.
func emptyTree(at string) (tree, error) {
	fd, err := host.NewTmpfs(unix.MOUNT_ATTR_RDONLY)
	if err != nil {
		return tree{}, fmt.Errorf("mask %s: %w", at, err)
	}
	return tree{at, fd, true}, nil
}

// openTree makes a tree of a bind mount of the spec, with its options, or of a mask.
func openTree(m specs.Mount) (tree, error) {
	if m.Type == emptyDirectory {
		return emptyTree(m.Destination)
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, m.Source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return tree{}, fmt.Errorf("mount %s: %w", m.Source, err)
	}
	attr := unix.MountAttr{Attr_set: flagsOf(m), Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
		unix.Close(fd)
		return tree{}, fmt.Errorf("mount %s: %w", m.Source, err)
	}
	return tree{path.Clean(m.Destination), fd, m.Type == mask}, nil
}

// bar gives the mount at a path the flags that CRIU leaves out: it takes a second mount of the same
// directory or file for one that has the flags of the first (do_bind_mount_v2 in CRIU's mount-v2.c),
// though it has bound it anew from outside, without flags. A path at which nothing is mounted is left
// to the inspection.
func bar(at string, flags uint64) error {
	fd, err := openInRoot(at, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	mounted, err := isMount(fd)
	if err != nil || !mounted {
		return err
	}
	return unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: flags})
}

// openInRoot opens a path from the thread's root. It follows links in the image's directories, as runc does,
// but never out of the container.
func openInRoot(at string, flags uint64) (int, error) {
	root, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(root)
	return proc.Openat2(root, at, &unix.OpenHow{Flags: flags | unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS})
}

// isMount reports whether an open file is where something is mounted.
func isMount(fd int) (bool, error) {
	var st unix.Statx_t
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_BASIC_STATS, &st)
	return st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, err
}

// missing returns those of the spec's mounts at whose destinations nothing is mounted in the thread's
// mount namespace. A mask is only missing where there is something.
func missing(mounts []specs.Mount) (found []specs.Mount, err error) {
	for _, m := range mounts {
		mounted := false
		at, err := openInRoot(m.Destination, 0)
		if err == nil {
			var st unix.Stat_t
			if mounted, err = isMount(at); err == nil {
				err = unix.Fstat(at, &st)
			}
			unix.Close(at)
			if m.Type == mask && st.Mode&unix.S_IFMT == unix.S_IFDIR {
				m.Type = emptyDirectory
			}
		} else if m.Type == mask && (errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR)) {
			continue
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return nil, fmt.Errorf("look for mount %s in the container: %w", m.Destination, err)
		}
		if !mounted {
			found = append(found, m)
		}
	}
	return found, nil
}

// mount attaches the tree in the thread's mount namespace, unless something is mounted there.
func (t tree) mount() error {
	target, err := openInRoot(t.at, 0)
	if errors.Is(err, unix.ENOENT) {
		if t.mask { // below another one
			return nil
		}
		if err := placeholder(t.at); err != nil {
			return err
		}
		target, err = openInRoot(t.at, 0)
	}
	if err != nil {
		return err
	}
	defer unix.Close(target)
	if mounted, err := isMount(target); err != nil || mounted {
		return err
	}
	return unix.MoveMount(t.fd, "", target, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}

// placeholder makes an empty file to mount on, in a directory that runc has prepared, or /dev. In a
// tmpfs of a user namespace, where the host's root has no ID (EOVERFLOW), the directory's owner makes it:
// the goroutine must be locked to its thread.
func placeholder(at string) error {
	dir, err := openInRoot(path.Dir(at), unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	err = makeEmpty(dir, path.Base(at))
	if !errors.Is(err, unix.EOVERFLOW) {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(dir, &st); err != nil {
		return err
	}
	// These return the ID before, never an error (setfsuid(2)).
	gid, _ := unix.SetfsgidRetGid(int(st.Gid))
	defer func() { _, _ = unix.SetfsgidRetGid(gid) }()
	uid, _ := unix.SetfsuidRetUid(int(st.Uid))
	defer func() { _, _ = unix.SetfsuidRetUid(uid) }()
	return makeEmpty(dir, path.Base(at))
}

func makeEmpty(dir int, name string) error {
	fd, err := unix.Openat(dir, name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}
