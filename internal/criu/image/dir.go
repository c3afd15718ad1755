// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// Dir is a directory that CRIU reads images from and nobody else sees: it is a tmpfs in a mount
// namespace of its own. It is filled (Set.Copy), then closed to changes (Seal), and gone with
// Close or with this process. Its files cannot be changed from outside meanwhile, with one
// exception: what is lent, which is files of the checkpoint, bound read-only. CRIU takes nothing
// from them but the content of the program's memory, and of its tmpfs mounts by package tmpfs.
type Dir struct {
	tmpfs int // the mount
	fd    int // the directory, once it is sealed
	ns    int // the mount namespace, once it is sealed
	binds []bind
}

// bind is a file that lies elsewhere.
type bind struct {
	name string
	tree int // its mount, attached nowhere
}

// NewDir returns an empty directory that may take so many bytes of memory; 0 leaves that to the
// kernel, which allows half of the machine's. Close must be called.
func NewDir(bytes uint64) (*Dir, error) {
	// The processes of a user namespace open images with an id of that namespace. Nobody else
	// comes as far as these modes.
	options := [][2]string{{"mode", "0755"}}
	if bytes > 0 {
		options = append(options, [2]string{"size", strconv.FormatUint(bytes, 10)})
	}
	mount, err := host.NewTmpfs(unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC, options...)
	if err != nil {
		return nil, fmt.Errorf("make a directory for CRIU's images: %w", err)
	}
	return &Dir{tmpfs: mount, fd: -1, ns: -1}, nil
}

func (d *Dir) write(name string, content func(*os.File) error) error {
	fd, err := unix.Openat(d.tmpfs, name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return fmt.Errorf("copy CRIU's image %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	if err := f.Chmod(0o644); err != nil {
		return fmt.Errorf("copy CRIU's image %s: %w", name, err)
	}
	return content(f)
}

// Bind lends CRIU an open file under a name. The file is not read.
func (d *Dir) Bind(name string, f *os.File) error {
	if err := d.write(name, func(*os.File) error { return nil }); err != nil { // what it is mounted on
		return err
	}
	tree, err := unix.OpenTree(int(f.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return fmt.Errorf("lend CRIU %s: %w", f.Name(), err)
	}
	d.binds = append(d.binds, bind{name, tree})
	return nil
}

// Seal makes the directory complete: nothing can be written to it any more. CRIU can then read
// it by Path.
func (d *Dir) Seal() error {
	return host.InNewMountNamespace(func() error {
		// Over anything: nobody looks around in this namespace.
		if err := unix.MoveMount(d.tmpfs, "", unix.AT_FDCWD, "/", unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("mount the directory with CRIU's images: %w", err)
		}
		for _, b := range d.binds {
			if err := unix.MoveMount(b.tree, "", d.tmpfs, b.name, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
				return fmt.Errorf("lend CRIU %s: %w", b.name, err)
			}
		}
		attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC, Propagation: unix.MS_PRIVATE}
		if err := setWhenFree(d.tmpfs, &attr); err != nil {
			return fmt.Errorf("make the directory with CRIU's images read-only: %w", err)
		}
		var err error
		if d.fd, err = unix.Openat(d.tmpfs, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
			return fmt.Errorf("open the directory with CRIU's images: %w", err)
		}
		if d.ns, err = unix.Open("/proc/thread-self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			return fmt.Errorf("keep the directory with CRIU's images: %w", err)
		}
		return nil
	})
}

// setWhenFree sets the attributes of a mount, whose files this process has closed. A process that it starts has them for a
// moment more, until it executes its program: what they are open for writing in is busy.
func setWhenFree(mount int, attr *unix.MountAttr) error {
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		err := unix.MountSetattr(mount, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, attr)
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
			return err
		}
	}
}

// Path returns the path of the sealed directory, for root and until Close.
func (d *Dir) Path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), d.fd) }

// Close removes the directory. What was lent stays where it is.
func (d *Dir) Close() {
	if d == nil {
		return
	}
	for _, b := range d.binds {
		unix.Close(b.tree)
	}
	for _, fd := range []int{d.fd, d.tmpfs, d.ns} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	d.binds, d.fd, d.tmpfs, d.ns = nil, -1, -1, -1
}
