// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// CgroupVersion is 2 where /sys/fs/cgroup is the one hierarchy of version 2, as
// runc decides it; else 1.
func CgroupVersion() int {
	var fs unix.Statfs_t
	if err := unix.Statfs("/sys/fs/cgroup", &fs); err == nil && fs.Type == unix.CGROUP2_SUPER_MAGIC {
		return 2
	}
	return 1
}

// Frozen says whether the cgroup of a process is frozen: with version 1 the
// freezer's state, with version 2 the kernel's word that every task has come to
// rest (cgroup.events), which can follow the order by some milliseconds.
func Frozen(pid int) (bool, error) {
	dir, err := freezerDir(pid)
	if err != nil {
		return false, fmt.Errorf("read the freezer of process %d: %w", pid, err)
	}
	if CgroupVersion() == 1 {
		state, err := os.ReadFile(filepath.Join(dir, "freezer.state"))
		if err != nil {
			return false, fmt.Errorf("read the freezer of process %d: %w", pid, err)
		}
		return strings.TrimSpace(string(state)) == "FROZEN", nil
	}
	events, err := os.ReadFile(filepath.Join(dir, "cgroup.events"))
	if err != nil {
		return false, fmt.Errorf("read the freezer of process %d: %w", pid, err)
	}
	return slices.Contains(strings.Split(string(events), "\n"), "frozen 1"), nil
}

// freezerDir is the directory of the cgroup that freezes a process.
func freezerDir(pid int) (string, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return "", err
	}
	root, controller := "/sys/fs/cgroup/freezer", "freezer"
	if CgroupVersion() == 2 {
		root, controller = "/sys/fs/cgroup", ""
	}
	for line := range strings.Lines(string(data)) {
		// hierarchy-ID:controller-list:cgroup-path, cgroups(7)
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) == 3 && slices.Contains(strings.Split(parts[1], ","), controller) {
			return filepath.Join(root, parts[2]), nil
		}
	}
	return "", errors.New("it is in no cgroup with a freezer")
}

// CgroupsOf returns the directories of the cgroup of that name, "/name", one in
// each mounted hierarchy that has it.
func CgroupsOf(name string) ([]string, error) {
	infos, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return nil, fmt.Errorf("list the cgroup hierarchies: %w", err)
	}
	var dirs []string
	for _, info := range infos {
		dir := filepath.Join(info.Mountpoint, name)
		if _, err := os.Stat(dir); err == nil {
			dirs = append(dirs, dir)
		}
	}
	return dirs, nil
}

// cgroupTree returns a cgroup's directory and those below it, the deepest first:
// the order in which they can be removed.
func cgroupTree(dir string) []string {
	var tree []string
	_ = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() {
			tree = append(tree, path)
		}
		return nil // what vanished meanwhile needs no removal
	})
	slices.Reverse(tree)
	return tree
}

// cgroupPIDs returns the processes in the cgroup of that name and below it.
func cgroupPIDs(name string) []int {
	dirs, err := CgroupsOf(name)
	if err != nil {
		return nil
	}
	var pids []int
	for _, dir := range dirs {
		for _, sub := range cgroupTree(dir) {
			data, err := os.ReadFile(filepath.Join(sub, "cgroup.procs"))
			if err != nil {
				continue
			}
			for field := range strings.FieldsSeq(string(data)) {
				if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
					pids = append(pids, pid)
				}
			}
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids)
}

// thawCgroup lets the processes of a cgroup and those below it run again: one
// that is frozen does not end before it is thawed.
func thawCgroup(name string) {
	dirs, err := CgroupsOf(name)
	if err != nil {
		return
	}
	for _, dir := range dirs {
		for _, sub := range cgroupTree(dir) {
			// Only one of the two files exists in a hierarchy, if any.
			_ = writeExisting(filepath.Join(sub, "freezer.state"), "THAWED")
			_ = writeExisting(filepath.Join(sub, "cgroup.freeze"), "0")
		}
	}
}

// writeExisting writes to a file but never makes one.
func writeExisting(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteString(text)
	return err
}

// removeCgroups removes the cgroup of that name, and those below it, from every
// hierarchy. It must hold no process.
func removeCgroups(name string) error {
	dirs, err := CgroupsOf(name)
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range dirs {
		for _, sub := range cgroupTree(dir) {
			if err := removeCgroup(sub); err != nil {
				errs = append(errs, fmt.Errorf("remove the cgroup %s: %w", sub, err))
			}
		}
	}
	return errors.Join(errs...)
}

// removeCgroup removes one directory. A process that has ended may hold it for
// a moment longer, even after it was waited for.
func removeCgroup(dir string) error {
	for deadline := time.Now().Add(endLimit); ; time.Sleep(5 * time.Millisecond) {
		err := unix.Rmdir(dir)
		if err == nil || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
			return err
		}
	}
}
