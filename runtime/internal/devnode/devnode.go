// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package devnode changes the device nodes of a container, and its cgroup's rules for them.
//
// runc makes the nodes of a container that is created. CRIU restores the nodes of the dump, with
// the numbers of another machine or GPU; Restored.Fix replaces them by those of the spec. Access
// adds and removes nodes while the container lives, when it is resumed on other GPUs.
//
// The container owns its /dev and may be hostile: nothing here follows a link in it or leaves it.
package devnode

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

const withinContainer = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS

// device is the kind and the numbers of a device.
type device struct {
	kind         uint32 // unix.S_IFCHR or S_IFBLK
	major, minor int64
}

func numbers(path string) (device, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return device{}, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR {
		return device{}, fmt.Errorf("%s is not a character device", path)
	}
	return device{unix.S_IFCHR, int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))}, nil
}

// List returns NVIDIA's nodes in the /dev of a container, by the pid of a process in it:
// those of its spec, and those that a resume on other GPUs or NVIDIA's library has added.
func List(pid int) (found []specs.LinuxDevice, err error) {
	err = withDev(pid, func(dev int) error {
		found, err = list(dev)
		return err
	})
	return found, err
}

func list(dev int) (found []specs.LinuxDevice, err error) {
	err = eachNode(dev, func(name, at string) error {
		var st unix.Stat_t
		if unix.Fstatat(dev, name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR {
			found = append(found, specs.LinuxDevice{Path: at, Type: "c", Major: int64(unix.Major(st.Rdev)), Minor: int64(unix.Minor(st.Rdev))})
		}
		if len(found) > mostNodes {
			return fmt.Errorf("the container's /dev has more than %d nodes of NVIDIA's: %w", mostNodes, proc.ErrTooMuch)
		}
		return nil
	})
	return found, err
}

// Verify refuses a container whose nodes of NVIDIA's are other devices than this machine's. The driver opens a node by its name
// alone: a helper in the container's namespaces opens what is there by the rights of the host's root.
func Verify(pid int) error {
	dev, err := unix.Open("/dev", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: "/dev", Err: err}
	}
	defer unix.Close(dev)
	here, err := list(dev)
	if err != nil || len(here) == 0 {
		return err
	}
	return withDev(pid, func(dev int) error { return verify(dev, here) })
}

func verify(dev int, here []specs.LinuxDevice) error {
	return eachNode(dev, func(name, at string) error {
		if !slices.ContainsFunc(here, func(d specs.LinuxDevice) bool { return d.Path == at }) {
			return nil // nobody opens it
		}
		var st unix.Stat_t
		if err := unix.Fstatat(dev, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return &os.PathError{Op: "stat", Path: at, Err: err}
		}
		is := func(d specs.LinuxDevice) bool {
			return d.Major == int64(unix.Major(st.Rdev)) && d.Minor == int64(unix.Minor(st.Rdev))
		}
		if st.Mode&unix.S_IFMT != unix.S_IFCHR || !slices.ContainsFunc(here, is) {
			return fmt.Errorf("what the container has at %s is none of this machine's nodes of NVIDIA's: %w", at, errdefs.ErrFailedPrecondition)
		}
		return nil
	})
}

// The container makes in its /dev what it likes: so its names are not all kept, and not read without end.
const (
	mostNodes = 1024 // CRIU's plugin takes no more
	mostNames = 1 << 18
)

// eachNode calls do for NVIDIA's nodes, by their paths below a /dev and in the container.
func eachNode(dev int, do func(name, at string) error) error {
	for _, dir := range cdi.NodeDirs() {
		nodes, err := listBeneath(dev, dir, mostNames)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("list the container's %s: %w", path.Join("/dev", dir), err)
		}
		for _, name := range nodes {
			if err := do(name, path.Join("/dev", name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// withDev calls do with a container's /dev, if it has one, by the pid of a process in it.
func withDev(pid int, do func(dev int) error) error {
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the container's root: %w", err)
	}
	defer unix.Close(root)
	dev, err := openBeneath(root, "dev")
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open the container's /dev: %w", err)
	}
	defer unix.Close(dev)
	return do(dev)
}

// inDev is withDev for changes. It does nothing when the container has the host's /dev:
// every node is in that one, and it is not ours to change.
func inDev(pid int, do func(dev int) error) error {
	return withDev(pid, func(dev int) error {
		var theirs, ours unix.Stat_t
		if err := unix.Fstat(dev, &theirs); err != nil {
			return fmt.Errorf("inspect the container's /dev: %w", err)
		}
		if err := unix.Stat("/dev", &ours); err != nil {
			return fmt.Errorf("inspect /dev: %w", err)
		}
		if theirs.Dev == ours.Dev && theirs.Ino == ours.Ino {
			return nil
		}
		return do(dev)
	})
}

func makeNode(dev int, d specs.LinuxDevice) error {
	want := device{unix.S_IFCHR, d.Major, d.Minor}
	if d.Type == "b" {
		want.kind = unix.S_IFBLK
	}
	at, ok := strings.CutPrefix(path.Clean(d.Path), "/dev/")
	if !ok {
		return errors.New("it is not in /dev")
	}
	dir, err := openDir(dev, path.Dir(at))
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	name := path.Base(at)
	rdev := unix.Mkdev(uint32(want.major), uint32(want.minor))
	var st unix.Stat_t
	switch err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); {
	case err == nil && st.Mode&unix.S_IFMT == want.kind && st.Rdev == rdev:
		return nil
	case err == nil:
		if err := unix.Unlinkat(dir, name, 0); err != nil {
			return fmt.Errorf("replace what is there: %w", err)
		}
	case !errors.Is(err, unix.ENOENT):
		return err
	}
	mode := uint32(cmp.Or(d.FileMode, new(os.FileMode(0o666))).Perm())
	if err := unix.Mknodat(dir, name, want.kind|mode, int(rdev)); err != nil {
		return err
	}
	return own(dir, name, want.kind, rdev, mode, d)
}

// own sets the owner and the mode of a new node, unless the container has replaced it.
func own(dir int, name string, kind uint32, rdev uint64, mode uint32, d specs.LinuxDevice) error {
	fd, err := unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != kind || st.Rdev != rdev {
		return errors.New("the container has put something else there")
	}
	if d.UID != nil || d.GID != nil {
		uid, gid := cmp.Or(d.UID, new(uint32)), cmp.Or(d.GID, new(uint32))
		if err := unix.Fchownat(fd, "", int(*uid), int(*gid), unix.AT_EMPTY_PATH); err != nil {
			return err
		}
	}
	return unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), mode) // past the umask
}

// openDir opens a directory below another, and makes it if need be.
func openDir(at int, dir string) (int, error) {
	fd, err := openBeneath(at, dir)
	if errors.Is(err, unix.ENOENT) && !strings.Contains(dir, "/") {
		if err := unix.Mkdirat(at, dir, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
			return -1, err
		}
		fd, err = openBeneath(at, dir)
	}
	return fd, err
}

// openBeneath opens a directory below another, not to be listed.
func openBeneath(at int, name string) (int, error) {
	return proc.Openat2(at, name, &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: withinContainer})
}

// listBeneath returns those of the names in a directory that NVIDIA's nodes have, with the directory's. Of
// more names than most it returns none.
func listBeneath(at int, dir string, most int) (nodes []string, err error) {
	fd, err := proc.Openat2(at, dir, &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: withinContainer})
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), dir)
	defer f.Close()
	for n := 0; n <= most; {
		names, err := f.Readdirnames(1024)
		if errors.Is(err, io.EOF) {
			return nodes, nil
		}
		if err != nil {
			return nil, err
		}
		n += len(names)
		for _, name := range names {
			if name = path.Join(dir, name); cdi.IsNode(path.Join("/dev", name)) {
				nodes = append(nodes, name)
			}
		}
	}
	return nil, fmt.Errorf("more than %d names: %w", most, proc.ErrTooMuch)
}

func removeBeneath(at int, name string) error {
	dir, err := openBeneath(at, path.Dir(name))
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	if err := unix.Unlinkat(dir, path.Base(name), 0); !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

// Refresh changes the numbers of a spec's nodes whose major number is each kernel's own choice
// (nvidia-uvm) to those of this machine, in the cgroup's rules as well: a spec out of a checkpoint
// image is another node's. A node that this machine does not have is refused.
func Refresh(spec *specs.Spec) error { return refresh(spec, numbers) }

func refresh(spec *specs.Spec, numbers func(path string) (device, error)) error {
	if spec.Linux == nil {
		return nil
	}
	for i, d := range spec.Linux.Devices {
		if !cdi.HasDynamicMajor(d.Path) {
			continue
		}
		here, err := numbers(d.Path)
		if errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("the container's spec has %s and this node has none: load the driver's module (nvidia-modprobe -u -c 0)", d.Path)
		}
		if err != nil {
			return err
		}
		if here.major == d.Major && here.minor == d.Minor {
			continue
		}
		spec.Linux.Devices[i].Major, spec.Linux.Devices[i].Minor = here.major, here.minor
		if spec.Linux.Resources == nil {
			continue
		}
		for j, rule := range spec.Linux.Resources.Devices {
			if rule.Allow && rule.Major != nil && *rule.Major == d.Major && rule.Minor != nil && *rule.Minor == d.Minor {
				spec.Linux.Resources.Devices[j].Major, spec.Linux.Resources.Devices[j].Minor = &here.major, &here.minor
			}
		}
	}
	return nil
}
