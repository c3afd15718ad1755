// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package names finds the names of files that CRIU knows by their inode alone.
//
//   - A file that was removed while it is open, and has another name, such as a hard link: CRIU puts a
//     link beside where it was, and removes the link when the processes run on. So nothing but this
//     machine's disk would lead to the file, and only until then. Removed has the dump open the file by
//     its other name.
//
//   - A file or directory that a program watches (inotify): the kernel opens no file of an overlay by its
//     handle, and in another container a volume's files have other handles. Watched returns names that CRIU
//     then looks at (irmap-scan-path).
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
	"os"
	"path"
	"syscall"

	"golang.org/x/sys/unix"
)

// inode is a file on this machine.
type inode struct{ device, number uint64 }

func inodeOf(st *unix.Stat_t) inode { return inode{st.Dev, st.Ino} }

// find returns a name, as a process sees it, of each wanted file that is in the file system mounted
// at a place that the process sees, at most so many directories deep. It looks below other mounts of the
// same file system, too.
func find(ctx context.Context, pid int, place string, wanted map[inode]bool, depth int) (map[inode]string, error) {
	root, err := os.OpenRoot(fmt.Sprintf("/proc/%d/root", pid))
	if err != nil {
		return nil, err
	}
	defer root.Close()
	w := walk{ctx: ctx, wanted: wanted, found: make(map[inode]string)}
	is, err := root.Lstat(path.Join(".", place))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // another mount covers it
	}
	if err == nil && !is.IsDir() { // a file that is mounted, or a socket
		st := is.Sys().(*syscall.Stat_t)
		w.see(inode{st.Dev, st.Ino}, place)
		return w.found, nil
	}
	top, err := root.OpenFile(path.Join(".", place), os.O_RDONLY|unix.O_DIRECTORY, 0) // whatever it is by now
	if err != nil {
		return nil, fmt.Errorf("look for a file below %s: %w", place, err)
	}
	defer top.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(top.Fd()), &st); err != nil {
		return nil, fmt.Errorf("look for a file below %s: %w", place, err)
	}
	w.device = st.Dev
	w.see(inodeOf(&st), place)
	if err := w.below(int(top.Fd()), place, depth); err != nil {
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

// see looks at a file in a directory, whose name is given.
func (w *walk) see(at inode, name ...string) {
	if w.wanted[at] && w.found[at] == "" {
		w.found[at] = path.Join(name...)
	}
}

// batchBytes is what is read of a directory at once: a tenant's directories lie two thousand deep, and have any
// number of names.
const batchBytes = 1 << 10

// below walks a directory.
func (w *walk) below(dir int, name string, depth int) error {
	if depth == 0 {
		return nil
	}
	batch := make([]byte, batchBytes)
	for {
		if err := w.ctx.Err(); err != nil {
			return err
		}
		n, err := unix.ReadDirent(dir, batch)
		if errors.Is(err, unix.EINTR) { // of FUSE
			continue
		}
		if errors.Is(err, unix.ENOENT) { // it was removed meanwhile
			return nil
		}
		if n <= 0 || err != nil {
			return err
		}
		_, _, entries := unix.ParseDirent(batch[:n], -1, nil)
		for _, e := range entries {
			if len(w.found) == len(w.wanted) {
				return nil
			}
			if err := w.entry(dir, e, name, depth); err != nil {
				return err
			}
		}
	}
}

func (w *walk) entry(dir int, entry, above string, depth int) error {
	var st unix.Stat_t
	if unix.Fstatat(dir, entry, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
		return nil // somebody else has removed it
	}
	w.see(inodeOf(&st), above, entry)
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || st.Dev != w.device || len(above)+1+len(entry) >= unix.PathMax {
		return nil
	}
	fd, err := unix.Openat(dir, entry, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer unix.Close(fd)
	return w.below(fd, path.Join(above, entry), depth-1)
}
