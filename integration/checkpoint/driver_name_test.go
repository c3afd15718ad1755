// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// The driver listens in each CUDA process on a name of the network namespace. A restore works while
// somebody has the name. Nor does it take the name: the kernel gives the numbers in it to later
// containers, and cuInit fails in a program whose name is taken.
func TestDriverNameIsTaken(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	first := driverName(t, k.MustPid(t))
	// Its number stays with it: a container of another test would get it with the name, and no cuInit.
	namespace, err := os.Open(fmt.Sprintf("/proc/%d/ns/pid", k.MustPid(t)))
	if err != nil {
		t.Fatal(err)
	}
	defer namespace.Close()
	names := map[string]bool{first: true}
	name := first
	for i := range 2 { // what was restored is checkpointed again
		ref := takeCheckpoint(t, shared, k, fmt.Sprint(i))
		k.Expect(t, "count", fmt.Sprint(102+i))
		k.MustRemove(t)
		another := takeName(t, name)
		k = restore(t, shared, k.ID, ref, k.Port)
		k.Expect(t, "count", fmt.Sprint(102+i))
		unix.Close(another)
		unix.Close(takeName(t, first)) // as the cuInit of a later program
		if name = driverName(t, k.MustPid(t)); names[name] {
			t.Errorf("the driver's name is %q after a restore, as before", name)
		}
		names[name] = true
	}
}

// driverName returns the abstract name that the driver listens on in a process, with its first zero.
func driverName(t *testing.T, pid int) string {
	t.Helper()
	list, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/unix", pid))
	if err != nil {
		t.Fatal(err)
	}
	byInode := make(map[string]string)
	for line := range strings.Lines(string(list)) {
		if f := strings.Fields(line); len(f) == 8 && strings.HasPrefix(f[7], "@cuda-uvmfd-") {
			byInode["socket:["+f[6]+"]"] = strings.ReplaceAll(f[7], "@", "\x00") // so the kernel prints zeros
		}
	}
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if link, err := os.Readlink(f); err == nil && byInode[link] != "" {
			return byInode[link]
		}
	}
	t.Fatalf("the process has no socket of the driver among\n%s", list)
	return ""
}

// takeName makes a socket of an abstract name.
func takeName(t *testing.T, name string) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrUnix{Name: "@" + name[1:]})
	}
	if err != nil {
		t.Fatalf("take the name %q: %v", name, err)
	}
	return fd
}
