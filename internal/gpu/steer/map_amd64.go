// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/gpu/ptrace"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// mapAll maps files over areas: each process's in turn, the processes at once.
func mapAll(mappings []Mapping, step func(string)) error {
	var threads []Thread
	var groups [][]Mapping // of each thread's process
	for _, m := range mappings {
		i := slices.IndexFunc(threads, func(t Thread) bool { return t.PID == m.PID })
		if i < 0 {
			i = len(threads)
			threads, groups = append(threads, Thread{PID: m.PID, TID: m.TID}), append(groups, nil)
		}
		groups[i] = append(groups[i], m)
	}
	return errors.Join(ptrace.InThreads(threads, step, func(i int, t *ptrace.Thread) error {
		return mapInto(t, groups[i])
	})...)
}

// openMapped opens a file for reading, which is enough for a private mapping. It refuses links, which
// a container may have put there, but for the kernel's to open files. A thread that takes the descriptor
// cannot open the file for writing by it, as far as the file has a name and the kernel can (Linux 5.12).
func openMapped(path string) (*os.File, error) {
	flags := os.O_RDONLY | unix.O_NONBLOCK // no FIFO is waited for either
	if descriptor, _ := filepath.Match("/proc/*/fd/*", path); !descriptor {
		flags |= unix.O_NOFOLLOW
	}
	f, err := os.OpenFile(path, flags, 0)
	if err != nil {
		return nil, err
	}
	if only, err := readOnly(f); err == nil {
		f.Close()
		return only, nil
	}
	return f, nil
}

// readOnly opens a file once more, by a mount of its own that is read-only.
func readOnly(f *os.File) (*os.File, error) {
	mount, err := unix.OpenTree(int(f.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, err
	}
	defer unix.Close(mount)
	if err := unix.MountSetattr(mount, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
		return nil, err
	}
	return os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", mount), os.O_RDONLY|unix.O_NONBLOCK, 0)
}

func mapInto(t *ptrace.Thread, mappings []Mapping) error {
	for _, m := range mappings {
		if m.Path == "" {
			if hugeZeros() {
				t.PreferHuge(m.Start, m.Bytes)
			}
			continue
		}
		f, err := openMapped(m.Path)
		if err != nil {
			return err
		}
		if err := staging.LongEnough(f, m.Offset+m.Bytes); err != nil {
			f.Close()
			return err
		}
		err = t.MapFile(f, m.Start, m.Bytes, m.Offset, unix.MAP_PRIVATE|unix.MAP_NORESERVE)
		f.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// hugeZeros reports whether the kernel has a huge page of zeros for what was never written. Without
// one, it would make a huge page for each that is read, and charge it to the container. See
// Documentation/admin-guide/mm/transhuge.rst.
func hugeZeros() bool {
	setting, err := os.ReadFile("/sys/kernel/mm/transparent_hugepage/use_zero_page")
	return err == nil && strings.TrimSpace(string(setting)) == "1"
}

// mapsFile returns nil if a process has the whole area mapped to its file at the right offset.
func mapsFile(pid int, b *stagingArea) error {
	// On btrfs and others, stat reports another device than the memory map does.
	page, err := unix.MmapPtr(int(b.Handle.Fd()), 0, nil, staging.PageSize, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map the area's file: %w", err)
	}
	defer func() { _ = unix.MunmapPtr(page, staging.PageSize) }()
	own, err := mappedAt(os.Getpid(), uint64(uintptr(page)), staging.PageSize)
	if err != nil {
		return err
	}
	there, err := mappedAt(pid, b.Start, b.Length)
	if err != nil {
		return err
	}
	if there.Inode == 0 || there.Inode != own.Inode || there.Device != own.Device || there.Offset != b.Offset {
		return fmt.Errorf("process %d: the driver has changed the staging area at %#x in a way that is not recognised", pid, b.Start)
	}
	return nil
}

// mappedAt returns a process's mapping that has this place, or the zero Mapping.
func mappedAt(pid int, at, length uint64) (proc.Mapping, error) {
	m, _, err := proc.FindMapping(pid, func(m *proc.Mapping) bool { return m.Start == at && m.End == at+length })
	return m, err
}
