// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"errors"
	"fmt"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cdi"
)

// The container owns its /dev and may be hostile: nothing here follows a
// symbolic link in it, or leaves it.
const withinContainer = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS

// deviceNode are the numbers of a device.
type deviceNode struct {
	kind         uint32 // unix.S_IFCHR or S_IFBLK
	major, minor int64
}

// deviceNumbers reads them off a node of this machine.
func deviceNumbers(path string) (deviceNode, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return deviceNode{}, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR {
		return deviceNode{}, fmt.Errorf("%s is no character device", path)
	}
	return deviceNode{unix.S_IFCHR, int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))}, nil
}

// isGPUNode says whether a node is NVIDIA's, or a GPU's for display.
func isGPUNode(p string) bool {
	return cdi.IsNode(p) || strings.HasPrefix(path.Clean(p), "/dev/dri/")
}

// fixNodes makes the GPU nodes of a restored container those of its spec. CRIU
// has restored /dev as it was at the dump, with another node's or another
// GPU's. What the spec mounts of the driver and the dump did not have is
// mounted. The processes may run meanwhile.
func (p *gpuPlan) fixNodes(pid int) error {
	if p.spec == nil {
		return nil
	}
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the container's root: %w", err)
	}
	defer unix.Close(root)
	dev, err := openBeneath(root, "dev", unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open the container's /dev: %w", err)
	}
	defer unix.Close(dev)
	if shared, err := isHostDev(dev); err != nil || shared {
		return err // the host's /dev, mounted into the container, is right and not ours
	}
	if err := p.dropStray(pid); err != nil {
		return err
	}
	if err := p.removeNodes(dev); err != nil {
		return err
	}
	if p.inUserNamespace() {
		return p.mountMissing(pid) // which may not make nodes; runc mounts them
	}
	for _, d := range p.devices {
		if !isGPUNode(d.Path) {
			continue
		}
		if err := makeNode(dev, d); err != nil {
			return fmt.Errorf("make %s in the container: %w", d.Path, err)
		}
	}
	return p.mountMissing(pid)
}

func (p *gpuPlan) inUserNamespace() bool {
	return p.spec.Linux != nil && slices.ContainsFunc(p.spec.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == specs.UserNamespace })
}

// has says whether the container is to keep what CRIU has put at a path.
func (p *gpuPlan) has(at string) bool {
	return !slices.Contains(p.stray, at) &&
		(slices.ContainsFunc(p.spec.Mounts, func(m specs.Mount) bool { return path.Clean(m.Destination) == at }) ||
			slices.ContainsFunc(p.devices, func(d specs.LinuxDevice) bool { return path.Clean(d.Path) == at }))
}

// isHostDev says whether a directory is this machine's own /dev.
func isHostDev(dev int) (bool, error) {
	var theirs, ours unix.Stat_t
	if err := unix.Fstat(dev, &theirs); err != nil {
		return false, fmt.Errorf("inspect the container's /dev: %w", err)
	}
	if err := unix.Stat("/dev", &ours); err != nil {
		return false, fmt.Errorf("inspect /dev: %w", err)
	}
	return theirs.Dev == ours.Dev && theirs.Ino == ours.Ino, nil
}

// removeNodes removes NVIDIA's nodes that the spec does not grant.
func (p *gpuPlan) removeNodes(dev int) error {
	for _, dir := range cdi.NodeDirs() {
		names, err := listBeneath(dev, dir)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return fmt.Errorf("list the container's %s: %w", path.Join("/dev", dir), err)
		}
		for _, name := range names {
			at := path.Join("/dev", dir, name)
			if !cdi.IsNode(at) || p.has(at) {
				continue
			}
			if err := removeBeneath(dev, path.Join(dir, name)); err != nil {
				return fmt.Errorf("remove %s from the container: %w", at, err)
			}
		}
	}
	return nil
}

// makeNode makes one node, unless it is there.
func makeNode(dev int, d specs.LinuxDevice) error {
	want := deviceNode{unix.S_IFCHR, d.Major, d.Minor}
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
	mode := uint32(0o666)
	if d.FileMode != nil {
		mode = uint32(d.FileMode.Perm())
	}
	if err := unix.Mknodat(dir, name, want.kind|mode, int(rdev)); err != nil {
		return err
	}
	return own(dir, name, want.kind, rdev, mode, d)
}

// own gives a new node its owner and mode, once it is sure that it is the one
// that was made: the container may have put another there.
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
		uid, gid := 0, 0
		if d.UID != nil {
			uid = int(*d.UID)
		}
		if d.GID != nil {
			gid = int(*d.GID)
		}
		if err := unix.Fchownat(fd, "", uid, gid, unix.AT_EMPTY_PATH); err != nil {
			return err
		}
	}
	return unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), mode) // past the umask
}

// openDir opens a directory below another, and makes it if need be.
func openDir(at int, dir string) (int, error) {
	fd, err := openBeneath(at, dir, unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) && !strings.Contains(dir, "/") {
		if err := unix.Mkdirat(at, dir, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
			return -1, err
		}
		fd, err = openBeneath(at, dir, unix.O_DIRECTORY)
	}
	return fd, err
}

// openBeneath opens something below a directory, not to be read or written.
func openBeneath(at int, name string, flags uint64) (int, error) {
	return unix.Openat2(at, name, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC | flags, Resolve: withinContainer})
}

// listBeneath lists a directory below another.
func listBeneath(at int, dir string) ([]string, error) {
	fd, err := unix.Openat2(at, dir, &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: withinContainer})
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), dir)
	defer f.Close()
	return f.Readdirnames(-1)
}

// removeBeneath removes a file below a directory.
func removeBeneath(at int, name string) error {
	dir, err := openBeneath(at, path.Dir(name), unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	if err := unix.Unlinkat(dir, path.Base(name), 0); !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

// dropStray unmounts the nodes that CRIU had to mount; removeNodes takes what
// they were mounted on.
func (p *gpuPlan) dropStray(pid int) error {
	if len(p.stray) == 0 {
		return nil
	}
	return inMountNamespace(pid, func() error {
		for _, at := range p.stray {
			dir, err := openFromRoot(path.Dir(at))
			if err != nil {
				return fmt.Errorf("unmount %s in the container: %w", at, err)
			}
			err = unix.Fchdir(dir)
			unix.Close(dir)
			if err == nil {
				err = unix.Unmount(path.Base(at), unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
			}
			if err != nil {
				return fmt.Errorf("unmount %s in the container: %w", at, err)
			}
		}
		return nil
	})
}

// openFromRoot opens a directory by its path from the thread's root.
func openFromRoot(dir string) (int, error) {
	root, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(root)
	return openBeneath(root, strings.TrimPrefix(path.Clean(dir), "/"), unix.O_DIRECTORY)
}

// mountMissing mounts what the spec mounts of the driver and the container does
// not have: CRIU restores the dump's mounts and no others.
func (p *gpuPlan) mountMissing(pid int) error {
	var trees []tree
	defer func() {
		for _, t := range trees {
			unix.Close(t.fd)
		}
	}()
	for _, m := range p.spec.Mounts {
		at := path.Clean(m.Destination)
		if !cdi.IsBind(m) || !cdi.IsNode(at) && !cdi.IsDriverFile(at) || slices.Contains(p.stray, at) {
			continue
		}
		t, err := openTree(m)
		if err != nil {
			return err
		}
		trees = append(trees, t)
	}
	if p.inUserNamespace() {
		for _, d := range p.devices {
			if !isGPUNode(d.Path) {
				continue
			}
			t, err := openTree(specs.Mount{Source: d.Path, Destination: d.Path, Options: []string{"nosuid", "noexec"}})
			if err != nil {
				return err
			}
			trees = append(trees, t)
		}
	}
	if len(trees) == 0 {
		return nil
	}
	return inMountNamespace(pid, func() error {
		for _, t := range trees {
			if err := t.mount(); err != nil {
				return fmt.Errorf("mount %s in the container: %w", t.at, err)
			}
		}
		return nil
	})
}

// tree is a mount that is not attached anywhere.
type tree struct {
	at string // where it is to be
	fd int
}

// openTree makes one of a bind mount of the spec, with its options.
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

// mount attaches the tree in the thread's mount namespace, if nothing is
// mounted there. Links in the image's directories are followed, as runc does,
// but never out of the container, whose root is the thread's.
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

// placeholder makes an empty file to mount on. Its directory is there: runc has
// prepared it, or it is /dev.
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

// inMountNamespace runs do in the mount namespace of a process, on a thread of
// its own that ends with it.
func inMountNamespace(pid int, do func() error) error {
	ns, err := unix.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the container's mount namespace: %w", err)
	}
	defer unix.Close(ns)
	result := make(chan error, 1)
	go onThread(func() {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			result <- fmt.Errorf("leave the shim's mount namespace: %w", err)
			return
		}
		if err := unix.Setns(ns, unix.CLONE_NEWNS); err != nil {
			result <- fmt.Errorf("enter the container's mount namespace: %w", err)
			return
		}
		result <- do()
	})
	return <-result
}

// onThread runs do on a thread that ends with it. That is never the process's
// first: it would not end but stay for good where do has taken it, and it is the
// one whose mounts and cgroups /proc/self shows to all others.
func onThread(do func()) {
	runtime.LockOSThread() // and not unlocked: the thread is of no more use
	if unix.Gettid() != os.Getpid() {
		do()
		return
	}
	done := make(chan struct{})
	go func() { // on another, since this one is taken
		defer close(done)
		onThread(do)
	}()
	<-done
	runtime.UnlockOSThread()
}
