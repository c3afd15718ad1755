// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package nodes

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
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
	at string // where it is to be
	fd int
}

// openTree makes a tree of a bind mount of the spec, with its options.
func openTree(m specs.Mount) (tree, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, m.Source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return tree{}, fmt.Errorf("mount %s: %w", m.Source, err)
	}
	var attr unix.MountAttr
	for option, flag := range map[string]uint64{
		"ro": unix.MOUNT_ATTR_RDONLY, "nosuid": unix.MOUNT_ATTR_NOSUID, "nodev": unix.MOUNT_ATTR_NODEV, "noexec": unix.MOUNT_ATTR_NOEXEC,
	} {
		if slices.Contains(m.Options, option) {
			attr.Attr_set |= flag
		}
	}
	attr.Propagation = unix.MS_PRIVATE
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
		unix.Close(fd)
		return tree{}, fmt.Errorf("mount %s: %w", m.Source, err)
	}
	return tree{path.Clean(m.Destination), fd}, nil
}

// mount attaches the tree in the thread's mount namespace, unless something is mounted there. Links
// in the image's directories are followed, as runc does, but never out of the container.
func (t tree) mount() error {
	root, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(root)
	how := &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS}
	target, err := unix.Openat2(root, t.at, how)
	if errors.Is(err, unix.ENOENT) {
		if err := placeholder(root, t.at); err != nil {
			return err
		}
		target, err = unix.Openat2(root, t.at, how)
	}
	if err != nil {
		return err
	}
	defer unix.Close(target)
	var st unix.Statx_t
	if err := unix.Statx(target, "", unix.AT_EMPTY_PATH, unix.STATX_BASIC_STATS, &st); err != nil {
		return err
	}
	if st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 {
		return nil
	}
	return unix.MoveMount(t.fd, "", target, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}

// placeholder makes an empty file to mount on, in a directory that runc has prepared, or /dev.
func placeholder(root int, at string) error {
	dir, err := unix.Openat2(root, path.Dir(at), &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	fd, err := unix.Openat(dir, path.Base(at), unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}
