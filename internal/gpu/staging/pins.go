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
	// files are the states of the files that have arrived, by their path through a pinned directory.
	files map[string]fileState
}

// fileState tells whether a file was exchanged or written to.
type fileState struct {
	device, inode   uint64
	size            int64
	written, change unix.Timespec
}

func stateOf(path string) (fileState, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return fileState{}, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return fileState{st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim}, nil
}

// Pin opens the directories of all pieces of a checkpoint's areas until Close.
func Pin(checkpoint *images.Checkpoint) (_ *Pins, err error) {
	p := &Pins{dirs: make(map[string]int), files: make(map[string]fileState)}
	defer func() {
		if err != nil {
			p.Close()
		}
	}()
	for _, a := range checkpoint.Areas() {
		for _, q := range a.Location {
			dir := filepath.Dir(q.Path)
			if _, ok := p.dirs[dir]; !ok {
				if p.dirs[dir], err = openReadOnly(dir); err != nil {
					delete(p.dirs, dir)
					return nil, fmt.Errorf("open the directory of the GPU state: %w", err)
				}
			}
			if q.Arrival == nil {
				path := p.pathOf(q)
				if p.files[path], err = stateOf(path); err != nil {
					return nil, fmt.Errorf("look at the GPU state: %w", err)
				}
			}
		}
	}
	return p, nil
}

// Changed reports whether a file that had arrived at Pin was exchanged or written to since.
func (p *Pins) Changed() bool {
	for path, was := range p.files {
		if is, err := stateOf(path); err != nil || is != was {
			return true
		}
	}
	return false
}

// pathOf returns the path of a piece's file through its pinned directory.
func (p *Pins) pathOf(q images.Piece) string {
	return fmt.Sprintf("/proc/%d/fd/%d/%s", os.Getpid(), p.dirs[filepath.Dir(q.Path)], filepath.Base(q.Path))
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
		if _, ok := p.dirs[filepath.Dir(q.Path)]; ok {
			l[i] = q.At(p.pathOf(q))
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
