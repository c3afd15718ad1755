// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// look is what a running container and its shim have.
type look struct {
	threads int      // of the program
	files   []string // that the shim has open
	bundle  []string
}

// look takes note of a container that runs.
func (l *lane) look(t testing.TB) look {
	t.Helper()
	threads, err := harness.Threads(l.pid)
	if err != nil {
		t.Fatal(err)
	}
	return look{threads: len(threads), files: openFiles(l.shim), bundle: names(shared.Bundle(l.k.ID))}
}

// asBefore waits until a container that runs is as it was: nothing of it is frozen, traced or
// mapped, and its shim has no processes, files or directories more.
func (l *lane) asBefore(t testing.TB, before look) {
	t.Helper()
	within(t, "all is as before", func() error {
		if frozen, err := harness.Frozen(l.pid); err != nil {
			return err
		} else if frozen {
			return errors.New("it is frozen")
		}
		now := l.look(t)
		if now.threads != before.threads {
			return fmt.Errorf("the program has %d threads, it had %d", now.threads, before.threads)
		}
		tids, _ := harness.Threads(l.pid)
		for _, tid := range tids {
			if tracer, err := harness.StatusField(tid, "TracerPid"); err != nil {
				return err
			} else if tracer != "0" {
				return fmt.Errorf("thread %d is traced by %s", tid, tracer)
			}
		}
		maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", l.pid))
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(maps)) {
			// One to restore from is the root of a mount of its own.
			if strings.Contains(line, "/gpu-") || strings.HasSuffix(line, " /\n") || strings.Contains(line, "memfd:gpuckpt") {
				return fmt.Errorf("the program has mapped %s", line)
			}
		}
		if pids := helpers(l.shim); len(pids) > 0 {
			return fmt.Errorf("the shim has %s", describe(pids))
		}
		// The socket of a CUDA helper that waits for another operation.
		if more := added(append(before.files, "socket"), now.files); len(more) > 0 {
			return fmt.Errorf("the shim has open %q, beside %q", more, before.files)
		}
		// The log of a dump that failed, which stays for people.
		if more := added(append(before.bundle, "criu-dump.log"), now.bundle); len(more) > 0 {
			return fmt.Errorf("the bundle has %q, beside %q", more, before.bundle)
		}
		return nil
	})
}

// added are those of now that are not in before, as often as they are more.
func added(before, now []string) (more []string) {
	before = slices.Clone(before)
	for _, name := range now {
		if at := slices.Index(before, name); at >= 0 {
			before = slices.Delete(before, at, at+1)
		} else {
			more = append(more, name)
		}
	}
	return more
}

// helpers are the processes of a shim that end with an operation. The CUDA helper may stay for half
// a minute.
func helpers(shim int) (pids []int) {
	children, _ := harness.Children(shim)
	for _, pid := range children {
		switch name := nameOf(pid); {
		case strings.HasPrefix(name, "gpuckpt-cuda-"):
		case strings.HasPrefix(name, "gpuckpt-"), name == "runc", name == "criu":
			pids = append(pids, pid)
		}
	}
	return pids
}

// movers are the CUDA helpers of a shim that have a file of GPU state open below a directory: they copy
// to it.
func movers(shim int, dir string) (pids []int) {
	children, _ := harness.Children(shim)
	for _, pid := range children {
		if nameOf(pid) == "gpuckpt-cuda-helper" && slices.ContainsFunc(openFiles(pid), func(name string) bool {
			return strings.HasPrefix(name, dir) && strings.HasPrefix(filepath.Base(name), "gpu-")
		}) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// nameOf is the first word of a process's command line, without its directory.
func nameOf(pid int) string {
	line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	first, _, _ := strings.Cut(strings.ReplaceAll(string(line), "\x00", " "), " ")
	return strings.TrimSuffix(filepath.Base(first), ":")
}

func describe(pids []int) string {
	var b strings.Builder
	for _, pid := range pids {
		state, _ := harness.ProcessState(pid)
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		fmt.Fprintf(&b, "%d (%s, %q) ", pid, state, strings.ReplaceAll(string(line), "\x00", " "))
	}
	return b.String()
}

// openFiles are what a process has open, sockets and pipes without their numbers. Left out are
// descriptors of processes and of their memory, which Go's garbage collector closes.
func openFiles(pid int) (files []string) {
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, fd := range fds {
		if name, err := os.Readlink(fd); err == nil && name != "anon_inode:[pidfd]" && filepath.Base(name) != "mem" {
			kind, _, _ := strings.Cut(name, ":[")
			files = append(files, kind)
		}
	}
	slices.Sort(files)
	return files
}

func names(dir string) (all []string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

// childNamed is a child of a process by the name of its program; 0 for none.
func childNamed(pid int, name string) int {
	children, _ := harness.Children(pid)
	for _, child := range children {
		if nameOf(child) == name {
			return child
		}
	}
	return 0
}

// comm is a process's name in the kernel.
func comm(pid int) string {
	text, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/comm")
	return strings.TrimSpace(string(text))
}
