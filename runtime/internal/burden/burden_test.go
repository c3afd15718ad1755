// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package burden

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// What processes have in any number is counted together, before anything looks at each.
func TestRefuseMany(t *testing.T) {
	pid := inGroups(t, 8)
	for _, l := range limits {
		n, err := l.count(pid, l.most)
		if err != nil || n < 3 {
			t.Fatal(l.what, n, err)
		}
		l.most = 4*n + 4096 // it may have some more by now
		if err := l.refuse([]int{pid, pid}); err != nil {
			t.Error(err)
		}
		l.most = n + n/2
		if err := l.refuse([]int{pid, pid}); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), l.what+" together") {
			t.Errorf("%s: error %v", l.what, err)
		}
		l.each = n / 2
		if err := l.refuse([]int{pid}); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "has more than") {
			t.Errorf("%s of one process: error %v", l.what, err)
		}
		const nobody = 1 << 30
		if err := l.refuse([]int{nobody}); err != nil {
			t.Errorf("%s of a process that has ended: %v", l.what, err)
		}
	}
}

// A thread may be in 65,536 groups, and the kernel writes them all whenever its status is read.
func TestRefuseGroups(t *testing.T) {
	pid := inGroups(t, 1<<16)
	if err := RefuseMany([]int{pid}); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "supplementary groups of threads") {
		t.Errorf("error %v", err)
	}
}

// inGroups returns a program with 40 threads or more that each are in as many groups.
func inGroups(t *testing.T, groups int) (pid int) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root may choose its groups")
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestInGroups$")
	cmd.Env = append(os.Environ(), "GPUCKPT_TEST_GROUPS="+strconv.Itoa(groups))
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	if text, err := bufio.NewReader(out).ReadString('\n'); text != "ready\n" {
		t.Fatalf("%q, %v", text, err)
	}
	return cmd.Process.Pid
}

// TestInGroups is the program of inGroups.
func TestInGroups(*testing.T) {
	n, err := strconv.Atoi(os.Getenv("GPUCKPT_TEST_GROUPS"))
	if err != nil {
		return
	}
	groups := make([]int, n)
	for i := range groups {
		groups[i] = 1<<31 + i
	}
	var there sync.WaitGroup
	for range 40 {
		there.Add(1)
		go func() {
			runtime.LockOSThread()
			there.Done()
			select {}
		}()
	}
	there.Wait()
	if err := syscall.Setgroups(groups); err != nil { // of all threads
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin)
	os.Exit(0)
}

// A dump has room, and what processes share since a fork leaves half of the room to others.
func TestRefuseMemory(t *testing.T) {
	const mib, gib = 1 << 20, 1 << 30
	for name, test := range map[string]struct {
		memory, takes, room, limit uint64
		refused                    error
	}{
		"one process":                       {3 * gib, 3 * gib, 4 * gib, 0, nil},
		"what is paged out too":             {3 * gib, 2 * gib, 4 * gib, 0, nil},
		"32 workers of a server of 2 GiB":   {33 * 2 * gib, 3 * gib, 500 * gib, 0, nil},
		"16 loaders of a program of 20 GiB": {17 * 20 * gib, 22 * gib, 800 * gib, 0, nil},
		"no room":                           {5 * gib, 5 * gib, 4 * gib, 0, unix.ENOSPC},
		"more than half of the room":        {40 * gib, 256 * mib, 60 * gib, 0, errdefs.ErrFailedPrecondition},
		"more than the node's limit":        {3 * gib, 256 * mib, 500 * gib, 2 * gib, errdefs.ErrFailedPrecondition},
		"less than the node's limit":        {3 * gib, 256 * mib, 4 * gib, 3 * gib, nil},
	} {
		if err := refuseMemory(test.memory, test.takes, test.room, test.limit); !errors.Is(err, test.refused) {
			t.Errorf("%s: error %v, want %v", name, err, test.refused)
		}
	}
}

// A file that was removed is dumped, once, by whichever descriptor or mapping a process has it; one that has
// a name is not, nor is memory.
func TestRemovedFiles(t *testing.T) {
	const size = 8 << 20
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(make([]byte, size)); err != nil {
		t.Fatal(err)
	}
	of := func() uint64 {
		t.Helper()
		bytes, err := removedFiles(os.Getpid(), make(map[inode]bool))
		if err != nil {
			t.Fatal(err)
		}
		return bytes
	}
	before := of()
	if err := os.Remove(f.Name()); err != nil {
		t.Fatal(err)
	}
	if now := of() - before; now != size {
		t.Errorf("a removed file of %d bytes takes %d", size, now)
	}
	mapped, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mapped)
	if now := of() - before; now != size {
		t.Errorf("mapped, too, it takes %d", now)
	}
	f.Close()
	memory, err := unix.MemfdCreate("memory", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(memory)
	if err := unix.Fallocate(memory, 0, 0, size); err != nil {
		t.Fatal(err)
	}
	if now := of() - before; now != size {
		t.Errorf("mapped alone it takes %d", now)
	}
}
