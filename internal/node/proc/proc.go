// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package proc reads what the kernel reports of processes and memory in /proc.
//
// A process may end at any time, and so may every reader here fail: the error of
// a process that has ended satisfies Ended. Nothing is cached; a value is true
// when it is read, and remains so only while the process is frozen or held.
//
// docs/decisions/0010-own-proc-reader.md explains why prometheus/procfs does not do.
package proc

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Ended reports whether an error of this package, or of a file in /proc, means
// that the process or thread has ended.
func Ended(err error) bool { return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) }

// Command returns the name of a process's program, at most 15 bytes of it, "" for
// a process that has ended.
func Command(pid int) string {
	name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return strings.TrimSpace(string(name))
}

// Describe names a process for a person: "4711 (python)".
func Describe(pid int) string {
	if name := Command(pid); name != "" {
		return fmt.Sprintf("%d (%s)", pid, name)
	}
	return strconv.Itoa(pid)
}

// Arguments returns the arguments of a process, its program's name first.
func Arguments(pid int) ([]string, error) { return list(pid, "cmdline") }

// Environment returns the environment that a process was started with.
func Environment(pid int) ([]string, error) { return list(pid, "environ") }

// list reads a file whose texts end with zero bytes.
func list(pid int, file string) (texts []string, err error) {
	data, err := Text(fmt.Sprintf("/proc/%d/%s", pid, file))
	if err != nil {
		return nil, err
	}
	for text := range bytes.SplitSeq(bytes.TrimSuffix(data, []byte{0}), []byte{0}) {
		texts = append(texts, string(text))
	}
	return texts, nil
}

// HasOpen reports whether a process has a file open whose link in /proc is the text given.
func HasOpen(pid int, link string) (bool, error) {
	files, err := OpenFiles(pid, link)
	return slices.Contains(slices.Collect(maps.Values(files)), link), err
}

// OpenFiles returns the links in /proc of the files that a process has open, by number: those
// that begin with one of the prefixes. To look at each takes as long as all else for a program with a million.
func OpenFiles(pid int, prefixes ...string) (map[int]string, error) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	names, err := Names(dir)
	if err != nil {
		return nil, err
	}
	files, kept := make(map[int]string), Bound(0)
	for _, name := range names {
		to, err := os.Readlink(filepath.Join(dir, name))
		// It was closed meanwhile, the process has ended, or the path has more than 4095 bytes, which nobody looks for.
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENAMETOOLONG) {
			continue
		}
		if err != nil {
			return nil, err
		}
		begins := func(prefix string) bool { return strings.HasPrefix(to, prefix) }
		if fd, err := strconv.Atoi(name); err == nil && slices.ContainsFunc(prefixes, begins) {
			files[fd] = to
			if err := kept.Take(to); err != nil {
				return nil, fmt.Errorf("names of files in %s: %w", dir, err)
			}
		}
	}
	return files, nil
}

// Copies groups descriptors of a process, those of one open file together and the lowest first. A program may
// have a million of one file, whose description in /proc takes the kernel long. On a kernel without kcmp(2) each
// descriptor is a group.
func Copies(pid int, files map[int]string) (groups [][]int) {
	order := func(a, b int) int {
		if is, ok := kcmp(pid, pid, kcmpFile, a, b); ok && is < 3 {
			return []int{0, -1, 1}[is]
		}
		return cmp.Compare(a, b)
	}
	fds := slices.Sorted(maps.Keys(files))
	slices.SortStableFunc(fds, order)
	for begin, end := 0, 0; begin < len(fds); begin = end {
		for end = begin + 1; end < len(fds) && order(fds[begin], fds[end]) == 0; end++ {
		}
		groups = append(groups, fds[begin:end])
	}
	return groups
}

// SameFile reports whether two processes share the open file of this number, as after a fork.
// It is false on a kernel without kcmp(2).
func SameFile(pid, other, fd int) bool {
	order, ok := kcmp(pid, other, kcmpFile, fd, fd)
	return ok && order == 0
}

// SharesMemory reports whether two processes have one address space, as a child of vfork and its
// parent do. It is false on a kernel without kcmp(2), and for two that have none any more.
func SharesMemory(pid, other int) bool {
	order, ok := kcmp(pid, other, kcmpVM, 0, 0)
	return ok && order == 0
}

// ThreadApart returns a thread that has something of its own that the threads of a process share as a rule,
// as by unshare(2), and what that is; 0 if there is none. On a kernel without kcmp(2) it sees the namespaces
// alone.
func ThreadApart(pid int) (tid int, what string, err error) {
	tids, err := Threads(pid)
	if err != nil || len(tids) < 2 {
		return 0, "", err
	}
	first := 0 // that has not ended
	for _, tid := range tids {
		if status, err := ThreadStatus(pid, tid); err != nil || status.Ended() {
			continue
		}
		if first == 0 {
			first = tid
			continue
		}
		switch {
		case differ(first, tid, kcmpFiles):
			return tid, "open files", nil
		case differ(first, tid, kcmpFS):
			return tid, "a working directory", nil
		}
		for _, kind := range []string{"net", "uts", "ipc"} {
			one, err := os.Readlink(fmt.Sprintf("/proc/%d/task/%d/ns/%s", pid, first, kind))
			other, oerr := os.Readlink(fmt.Sprintf("/proc/%d/task/%d/ns/%s", pid, tid, kind))
			if err == nil && oerr == nil && one != other {
				return tid, "a " + kind + " namespace", nil
			}
		}
	}
	return 0, "", nil
}

// What kcmp(2) compares, by linux/kcmp.h.
const (
	kcmpFile  = 0
	kcmpVM    = 1
	kcmpFiles = 2
	kcmpFS    = 3
)

// kcmp returns the order of what two processes or threads have, 0 if it is the same. It is not ok on a kernel without
// kcmp(2).
func kcmp(one, other, kind, a, b int) (order int, ok bool) {
	r, _, errno := unix.Syscall6(unix.SYS_KCMP, uintptr(one), uintptr(other), uintptr(kind), uintptr(a), uintptr(b), 0)
	return int(r), errno == 0
}

func differ(one, other, kind int) bool {
	order, ok := kcmp(one, other, kind, 0, 0)
	return ok && order != 0
}

// Ticks returns the time that a process, with those of its children that have ended, has taken from
// the processors, in ticks of a hundredth of a second as a rule; 0 for one that is gone.
func Ticks(pid int) (ticks uint64) {
	fields, err := stat(pid)
	if err != nil {
		return 0
	}
	for _, field := range fields[14:18] { // utime, stime, cutime, cstime
		n, _ := strconv.ParseUint(field, 10, 64)
		ticks += n
	}
	return ticks
}

// Work returns a number that grows while a process itself computes, or touches memory that it has not
// touched before: its page faults, and the time that it has taken from the processors in ticks of a
// hundredth of a second as a rule. The error satisfies Ended for a process that is gone.
func Work(pid int) (count uint64, err error) {
	fields, err := stat(pid)
	if err != nil {
		return 0, err
	}
	for _, at := range []int{10, 12, 14, 15} { // minflt, majflt, utime, stime: proc_pid_stat(5)
		n, err := strconv.ParseUint(fields[at], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read the work of process %d: %w", pid, err)
		}
		count += n
	}
	return count, nil
}

// Children returns the children of all threads of a process.
func Children(pid int) (pids []int) {
	tids, _ := Threads(pid)
	for _, tid := range tids {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, tid)) // a thread that has ended has none
		for word := range strings.FieldsSeq(string(text)) {
			if child, err := strconv.Atoi(word); err == nil {
				pids = append(pids, child)
			}
		}
	}
	return pids
}

// NotBelow returns those of the processes that live and are neither root nor descendants
// of root.
func NotBelow(root int, pids []int) ([]int, error) {
	parent := make(map[int]int)
	for _, pid := range pids {
		status, err := StatusOf(pid)
		if Ended(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		parent[pid] = status.Parent()
	}
	var out []int
	for _, pid := range pids {
		p, known := pid, true
		for p != root && known {
			p, known = parent[p]
		}
		if _, lives := parent[pid]; lives && p != root {
			out = append(out, pid)
		}
	}
	return out, nil
}

// HasTerminal reports whether a process has a controlling terminal.
func HasTerminal(pid int) (bool, error) {
	fields, err := stat(pid)
	return err == nil && fields[7] != "0", err
}

// Threads returns the threads of a process, ascending. While threads come and go
// the listing may lack one that lives on.
func Threads(pid int) ([]int, error) {
	names, err := Names(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return nil, fmt.Errorf("list the threads of process %d: %w", pid, err)
	}
	tids := make([]int, 0, len(names))
	for _, name := range names {
		tid, err := strconv.Atoi(name)
		if err != nil {
			return nil, fmt.Errorf("list the threads of process %d: %w", pid, err)
		}
		tids = append(tids, tid)
	}
	slices.Sort(tids)
	return tids, nil
}

// MemAvailable returns the memory that programs can take without swapping, in
// bytes, out of the text of /proc/meminfo; see proc_meminfo(5).
func MemAvailable() (bytes uint64, known bool) {
	text, _ := os.ReadFile("/proc/meminfo")
	return ParseMemAvailable(text)
}

// ParseMemAvailable is MemAvailable by the text of a /proc/meminfo.
func ParseMemAvailable(meminfo []byte) (bytes uint64, known bool) {
	kib, err := strconv.ParseUint(strings.TrimSuffix(Status(meminfo).Field("MemAvailable"), " kB"), 10, 54)
	return kib << 10, err == nil
}
