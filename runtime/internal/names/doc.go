// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package names finds the names of files that CRIU knows by their inode alone.
//
//   - A file that was removed while it is open, and has another name, such as a hard link: CRIU puts a
//     link beside where it was, and removes the link when the processes run on. So nothing but this
//     machine's disk would lead to the file, and only until then. Removed has the dump open the file by
//     its other name.
//
//   - A file or directory of an overlay that a program watches (inotify): the kernel opens no file of an
//     overlay by its handle. Watched returns names that CRIU then looks at (irmap-scan-path).
//
//   - A Unix socket that was renamed after it was bound: the kernel tells CRIU the old name. Sockets has
//     the dump bind it to the new one.
//
//   - Shared memory, whose content CRIU calls by its number. Numbers refuses two with one number.
//
// The processes must stand still. What they have on their file systems is walked without following a
// symbolic link, for as long as the dump may take.
package names

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// inode is a file on this machine.
type inode struct{ device, number uint64 }

func inodeOf(st *unix.Stat_t) inode { return inode{st.Dev, st.Ino} }

// find returns a name, as a process sees it, of each wanted file that is in the file system mounted
// at a place that the process sees. It looks below other mounts of the same file system, too.
func find(ctx context.Context, pid int, place string, wanted map[inode]bool) (map[inode]string, error) {
	root, err := os.OpenRoot(fmt.Sprintf("/proc/%d/root", pid))
	if err != nil {
		return nil, err
	}
	defer root.Close()
	top, err := root.Open(path.Join(".", place))
	if err != nil {
		return nil, fmt.Errorf("look for a file below %s: %w", place, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(top.Fd()), &st); err != nil {
		top.Close()
		return nil, fmt.Errorf("look for a file below %s: %w", place, err)
	}
	w := walk{ctx: ctx, device: st.Dev, wanted: wanted, found: make(map[inode]string)}
	w.see(&st, place)
	if err := w.below(top, place); err != nil {
		return nil, fmt.Errorf("look for a file below %s: %w", place, err)
	}
	return w.found, nil
}

type walk struct {
	ctx    context.Context
	device uint64
	wanted map[inode]bool
	found  map[inode]string
}

func (w *walk) see(st *unix.Stat_t, name string) {
	if at := inodeOf(st); w.wanted[at] && w.found[at] == "" {
		w.found[at] = name
	}
}

// below walks a directory, and closes it.
func (w *walk) below(dir *os.File, name string) error {
	defer dir.Close()
	for {
		if err := w.ctx.Err(); err != nil {
			return err
		}
		entries, err := dir.Readdirnames(1024)
		for _, e := range entries {
			if len(w.found) == len(w.wanted) {
				return nil
			}
			if err := w.entry(dir, e, path.Join(name, e)); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (w *walk) entry(dir *os.File, entry, name string) error {
	var st unix.Stat_t
	if unix.Fstatat(int(dir.Fd()), entry, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
		return nil // somebody else has removed it
	}
	w.see(&st, name)
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || st.Dev != w.device || len(name) >= unix.PathMax {
		return nil
	}
	fd, err := unix.Openat(int(dir.Fd()), entry, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	return w.below(os.NewFile(uintptr(fd), strings.ToValidUTF8(name, "?")), name)
}
