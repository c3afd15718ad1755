// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
)

// Memory is what a process occupies, in bytes.
type Memory struct {
	// RSS counts every resident page in full.
	RSS int64
	// PSS counts a page shared by n processes as one n-th of a page.
	PSS int64
}

// ProcessMemory reads /proc/PID/smaps_rollup. The process may be running.
func ProcessMemory(pid int) (Memory, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return Memory{}, fmt.Errorf("read the memory of process %d: %w", pid, err)
	}
	var m Memory
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		if len(fields) != 3 || fields[2] != "kB" {
			continue
		}
		kib, err := strconv.ParseInt(fields[1], 10, 64)
		if err != nil {
			return Memory{}, fmt.Errorf("read the memory of process %d: %w", pid, err)
		}
		switch fields[0] {
		case "Rss:":
			m.RSS = kib << 10
		case "Pss:":
			m.PSS = kib << 10
		}
	}
	return m, nil
}

// Threads returns the thread ids of a process, in ascending order.
func Threads(pid int) ([]int, error) {
	tids, err := numericNames(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return nil, fmt.Errorf("list the threads of process %d: %w", pid, err)
	}
	return tids, nil
}

// Children returns the pids of the processes that a process started and that
// still exist, in ascending order; not their own children.
func Children(pid int) ([]int, error) {
	tids, err := Threads(pid)
	if err != nil {
		return nil, fmt.Errorf("list the children of process %d: %w", pid, err)
	}
	var children []int
	for _, tid := range tids {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, tid))
		if errors.Is(err, fs.ErrNotExist) {
			continue // the thread ended since
		}
		if err != nil {
			return nil, fmt.Errorf("list the children of process %d: %w", pid, err)
		}
		for field := range strings.FieldsSeq(string(data)) {
			child, err := strconv.Atoi(field)
			if err != nil {
				return nil, fmt.Errorf("list the children of process %d: %w", pid, err)
			}
			children = append(children, child)
		}
	}
	slices.Sort(children)
	return children, nil
}

// MountsUnder returns the mount points at and below a directory, in the order
// in which they were mounted, as this process's mount namespace shows them.
func MountsUnder(dir string) ([]string, error) {
	infos, err := mountinfo.GetMounts(mountinfo.PrefixFilter(filepath.Clean(dir)))
	if err != nil {
		return nil, fmt.Errorf("list the mounts under %s: %w", dir, err)
	}
	points := make([]string, len(infos))
	for i, info := range infos {
		points[i] = info.Mountpoint
	}
	return points, nil
}

// ProcessState returns the state letter of /proc/PID/stat: R running,
// S sleeping, D waiting in the kernel (and frozen, on cgroup v1), T stopped,
// t held by a tracer, Z ended but not yet waited for.
func ProcessState(pid int) (string, error) {
	fields, err := statFields(pid)
	if err != nil {
		return "", fmt.Errorf("read the state of process %d: %w", pid, err)
	}
	return fields[0], nil
}

// processStart returns when a process started, in clock ticks since the
// machine did. With the pid it tells one process from another for good.
func processStart(pid int) (string, error) {
	fields, err := statFields(pid)
	if err != nil {
		return "", fmt.Errorf("read the start of process %d: %w", pid, err)
	}
	return fields[19], nil
}

// statFields returns /proc/PID/stat from its third field, the state, on: the
// second, the program's name, may hold spaces and parentheses (proc(5)).
func statFields(pid int) ([]string, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil, err
	}
	fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	if len(fields) < 20 {
		return nil, fmt.Errorf("/proc/%d/stat has %d fields after the name", pid, len(fields))
	}
	return fields, nil
}

// numericNames returns the entries of a directory whose names are numbers.
func numericNames(dir string) ([]int, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var numbers []int
	for _, entry := range entries {
		if n, err := strconv.Atoi(entry.Name()); err == nil {
			numbers = append(numbers, n)
		}
	}
	slices.Sort(numbers)
	return numbers, nil
}

// StatusField is a line of /proc/PID/status: "PPid", "Name".
func StatusField(pid int, name string) (string, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return "", fmt.Errorf("read the status of process %d: %w", pid, err)
	}
	for line := range strings.Lines(string(data)) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value), nil
		}
	}
	return "", fmt.Errorf("read the status of process %d: it has no %s", pid, name)
}

// Parent is the process that started a process, or took it over.
func Parent(pid int) (int, error) {
	text, err := StatusField(pid, "PPid")
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(text)
}
