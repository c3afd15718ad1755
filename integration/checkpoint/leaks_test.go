// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// cycles is how often the tests here go there and back: 12 times, or as GPUCKPT_TEST_CYCLES says.
var cycles = sync.OnceValue(func() int {
	if n, err := strconv.Atoi(os.Getenv("GPUCKPT_TEST_CYCLES")); err == nil && n > 0 {
		return n
	}
	return 12
})

// openFiles are what a process has open, sockets and pipes without their numbers.
// Left out are descriptors of processes: those of runc's that containerd's packages
// started stay until Go's garbage collector comes by, half a minute later or more.
func openFiles(t *testing.T, pid int) (files []string) {
	t.Helper()
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if name, err := os.Readlink(fd); err == nil && name != "anon_inode:[pidfd]" {
			kind, _, _ := strings.Cut(name, ":[")
			files = append(files, kind)
		}
	}
	slices.Sort(files)
	return files
}

// threadsOf counts a process's threads.
func threadsOf(t *testing.T, pid int) int {
	t.Helper()
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(tasks)
}

// A shim that takes many checkpoints keeps nothing of them open, nor threads,
// nor children, nor files.
func TestManyCheckpoints(t *testing.T) {
	result := results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	shim := shimOf(t, k)
	memory := memoryDir(t)
	take := func(n int) {
		dir := filepath.Join(t.TempDir(), "images")
		if n%2 == 0 {
			dir = filepath.Join(memory, fmt.Sprint(n))
		}
		checkpointInto(t, shared, k, dir)
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
	settled := func() bool { return len(childrenOf(shim, "gpuckpt-")) == 0 }
	take(0)
	take(1)
	harness.Within(t, "helper and tracer end", settled)
	files, threads, bundle := openFiles(t, shim), threadsOf(t, shim), names(t, shared.Bundle(k.ID))
	show := func(when string) {
		memory, err := harness.ProcessMemory(shim)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s the shim has %d bytes of memory, %d threads, %d files", when, memory.RSS, threadsOf(t, shim), len(openFiles(t, shim)))
		result.Number("shim_"+when+"_bytes", float64(memory.RSS))
	}
	show("before")
	for n := range cycles() {
		take(n)
	}
	harness.Within(t, "helper and tracer end", settled)
	show("after")
	harness.Within(t, "as many files are open as before", func() bool { return len(openFiles(t, shim)) <= len(files) })
	if now := openFiles(t, shim); len(now) > len(files) {
		t.Errorf("the shim has open\n%q, before it had\n%q", now, files)
	}
	// Go keeps the threads it has; their number may grow a little by chance, to one for each processor
	// that digests, and not with each checkpoint.
	if now := threadsOf(t, shim); now >= threads+max(10, cycles()/3, runtime.NumCPU()) {
		t.Errorf("the shim has %d threads, before it had %d", now, threads)
	}
	if now := names(t, shared.Bundle(k.ID)); !slices.Equal(now, bundle) {
		t.Errorf("the bundle has %q, before it had %q", now, bundle)
	}
	k.Expect(t, "count", "102")
}

// Many restores, one from the other, leave no mounts, cgroups, directories or
// processes on the machine.
func TestManyRestores(t *testing.T) {
	results.Add(t)
	c := session.Own(t, harness.Options{}) // nobody else's come and go in it
	k := c.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	dir := memoryDir(t)
	cycle := func(n int) {
		images := filepath.Join(dir, fmt.Sprint(n))
		checkpointInto(t, c, k, images)
		endTask(t, c, k)
		if err := restoreTask(t, c, k, images); err != nil {
			t.Fatalf("restore %d: %v\n%s", n, err, c.LogTail(3000))
		}
		if err := os.RemoveAll(images); err != nil {
			t.Fatal(err)
		}
	}
	cycle(-1)
	before := machine(t, c)
	if !slices.ContainsFunc(before, func(s string) bool { return strings.HasPrefix(s, "mount ") }) ||
		!slices.ContainsFunc(before, func(s string) bool { return strings.HasPrefix(s, "cgroup ") }) {
		t.Fatalf("a running container has a mount and a cgroup, and these were not found: %q", before)
	}
	for n := range cycles() {
		cycle(n)
	}
	harness.Within(t, "the helpers end", func() bool { return len(childrenOf(shimOf(t, k), "gpuckpt-")) == 0 })
	harness.Within(t, "the machine is as it was", func() bool { return slices.Equal(machine(t, c), before) })
	if now := machine(t, c); !slices.Equal(now, before) {
		t.Errorf("there are\n%q, before there were\n%q", now, before)
	}
	k.Expect(t, "count", "102")
}

// machine lists what a containerd's containers have on the machine: mounts,
// cgroups, directories and shims.
func machine(t *testing.T, c *harness.Containerd) (all []string) {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if fields := strings.Fields(line); strings.Contains(fields[4], c.Namespace()) {
			all = append(all, "mount "+fields[4])
		}
	}
	for _, pattern := range []string{"/sys/fs/cgroup/*/" + c.Namespace() + "/*", "/sys/fs/cgroup/" + c.Namespace() + "/*"} {
		dirs, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range dirs {
			if st, err := os.Stat(d); err == nil && st.IsDir() {
				all = append(all, "cgroup "+d)
			}
		}
	}
	for _, dir := range []string{filepath.Join(c.Dir(), "tmp"), filepath.Dir(c.Bundle("x"))} {
		for _, name := range names(t, dir) {
			all = append(all, "file "+filepath.Join(dir, name))
		}
	}
	for _, name := range names(t, "/proc") {
		if line, err := os.ReadFile("/proc/" + name + "/cmdline"); err == nil && strings.Contains(string(line), c.Namespace()) && strings.Contains(string(line), "shim") {
			all = append(all, "shim")
		}
	}
	slices.Sort(all)
	return all
}

// names lists a directory.
func names(t *testing.T, dir string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}
