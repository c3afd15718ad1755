// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package staging

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
)

// Pins hold the directories with a checkpoint's GPU state from before a container's processes run.
// A hostile process may have them in its own root file system: it would put a link to a file of the
// host in the place of its state, and so have that file mapped into itself.
type Pins struct {
	dirs map[string]int // descriptors, by path
}

// Pin opens the directories of all pieces of a checkpoint's areas until Close.
func Pin(checkpoint *images.Checkpoint) (_ *Pins, err error) {
	p := &Pins{dirs: make(map[string]int)}
	defer func() {
		if err != nil {
			p.Close()
		}
	}()
	for _, a := range checkpoint.Areas() {
		for _, q := range a.Location {
			dir := filepath.Dir(q.Path)
			if _, ok := p.dirs[dir]; ok {
				continue
			}
			if p.dirs[dir], err = openReadOnly(dir); err != nil {
				delete(p.dirs, dir)
				return nil, fmt.Errorf("open the directory of the GPU state: %w", err)
			}
		}
	}
	return p, nil
}

// openReadOnly opens a directory by a mount of its own that nothing can be written through: a
// process gets a descriptor of a file in it for a moment, and as the host's root could open the
// file again by that. Where such a mount cannot be made, the directory is opened as it is.
func openReadOnly(dir string) (int, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err == nil {
		attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC}
		if err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err == nil {
			return fd, nil
		}
		unix.Close(fd)
	}
	if fd, err = unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
		return -1, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	return fd, nil
}

// At returns a location whose files are opened through their pinned directories.
func (p *Pins) At(l images.Location) images.Location {
	l = slices.Clone(l)
	for i, q := range l {
		if fd, ok := p.dirs[filepath.Dir(q.Path)]; ok {
			l[i] = q.At(fmt.Sprintf("/proc/%d/fd/%d/%s", os.Getpid(), fd, filepath.Base(q.Path)))
		}
	}
	return l
}

// Close closes the directories. It can be called on nil.
func (p *Pins) Close() {
	if p == nil {
		return
	}
	for _, fd := range p.dirs {
		unix.Close(fd)
	}
	p.dirs = nil
}
