// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package names

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// byName are file systems of which CRIU itself finds a watched file's name, or never does: the kernel's.
var byName = []string{"tmpfs", "devtmpfs", "proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue", "securityfs", "debugfs", "tracefs"}

// Watched returns the names of what a container's processes watch, those that CRIU must look at first before
// the others: CRIU looks for a file in all of a directory that it is told of. What has no name is left to
// CRIU, which refuses it.
func Watched(ctx context.Context, init int, list func() ([]int, error)) ([]string, error) {
	wanted, err := watches(list)
	if err != nil || len(wanted) == 0 {
		return nil, err
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/mountinfo", init))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	mounts, err := mountinfo.GetMountsFromReader(f, func(m *mountinfo.Info) (skip, stop bool) {
		return slices.Contains(byName, m.FSType) || wanted[unix.Mkdev(uint32(m.Major), uint32(m.Minor))] == nil, false
	})
	if err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(fmt.Sprintf("/proc/%d/root", init))
	if err != nil {
		return nil, err
	}
	defer root.Close()
	var names []string
	// One file system may be mounted often, such as volumes. What is watched is mostly what is mounted, or lies
	// little below: a large volume is not walked for it.
	for _, depth := range []int{0, 2, unix.PathMax} {
		for _, m := range mounts {
			device := unix.Mkdev(uint32(m.Major), uint32(m.Minor))
			if len(wanted[device]) == 0 {
				continue
			}
			found, err := find(ctx, init, m.Mountpoint, wanted[device], depth)
			if err != nil {
				return nil, err
			}
			for at, name := range found {
				delete(wanted[device], at)
				if err := watchable(root, name); err != nil {
					return nil, err
				}
				if name == "/" {
					name = "/." // CRIU leaves out the first letter
				}
				names = append(names, name)
			}
		}
	}
	slices.SortFunc(names, func(a, b string) int { return strings.Count(b, "/") - strings.Count(a, "/") })
	return names, nil
}

// watchable refuses what CRIU would not watch again: for a link it would take where the link leads, and the name of
// a socket is made later.
func watchable(root *os.Root, name string) error {
	is, err := root.Lstat(path.Join(".", name))
	if err != nil {
		return nil // CRIU will say what is wrong with it
	}
	if is.Mode()&(fs.ModeSymlink|fs.ModeSocket) != 0 {
		return fmt.Errorf("a program watches %s (inotify), a symbolic link or the name of a Unix socket, and CRIU cannot restore that: have it watch the directory: %w", name, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// watches returns what processes watch, by the file system that it is on.
func watches(list func() ([]int, error)) (map[uint64]map[inode]bool, error) {
	pids, err := list()
	if err != nil && !proc.Ended(err) {
		return nil, err
	}
	all := make(map[uint64]map[inode]bool)
	for _, pid := range pids {
		files, err := proc.OpenFiles(pid, "anon_inode:inotify")
		if err != nil && !proc.Ended(err) {
			return nil, err
		}
		for _, copies := range proc.Copies(pid, files) {
			lines, err := proc.FileInfo(pid, copies[0], "inotify ")
			if err != nil && !proc.Ended(err) {
				return nil, err
			}
			for _, line := range lines {
				var wd int
				var number, device uint64
				if n, _ := fmt.Sscanf(line, "wd:%x ino:%x sdev:%x", &wd, &number, &device); n != 3 {
					continue
				}
				at := inode{unix.Mkdev(uint32(device>>20), uint32(device&(1<<20-1))), number} // as the kernel counts devices itself
				if all[at.device] == nil {
					all[at.device] = make(map[inode]bool)
				}
				all[at.device][at] = true
			}
		}
	}
	return all, nil
}
