// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package reaper

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// hasMemory makes the test's executable a program with much memory, private or shared.
const hasMemory = "GPUCKPT_TEST_MEMORY"

func TestMain(m *testing.M) {
	if kind := os.Getenv(hasMemory); kind != "" {
		flags := unix.MAP_ANONYMOUS | unix.MAP_POPULATE | unix.MAP_PRIVATE
		if kind == "shared" {
			flags ^= unix.MAP_PRIVATE | unix.MAP_SHARED
		}
		if _, err := unix.Mmap(-1, 0, least+32<<20, unix.PROT_READ|unix.PROT_WRITE, flags); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("ready")
		_, _ = io.Copy(io.Discard, os.Stdin) // until the test ends
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// program starts such a program.
func program(t *testing.T, kind string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{hasMemory + "=" + kind}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	var line string
	if _, err := fmt.Fscanln(out, &line); err != nil || line != "ready" {
		t.Fatalf("%q, %v", line, err)
	}
	return cmd
}

// A process with much memory that is killed is freed by others too.
func TestHelp(t *testing.T) {
	if _, _, err := unix.Syscall(unix.SYS_PROCESS_MRELEASE, ^uintptr(0), 0, 0); err == unix.ENOSYS {
		t.Skip("the kernel has no process_mrelease")
	}
	for try := 1; ; try++ {
		cmd := program(t, "private")
		over := begin(func() ([]int, error) { return []int{cmd.Process.Pid}, nil })
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		err := cmd.Wait()
		helped, _ := over()
		if exit := new(exec.ExitError); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != unix.SIGKILL {
			t.Fatalf("the program's end: %v", err)
		}
		if helped > 0 {
			return
		}
		if try == 10 { // on a busy machine it may end before a thread can help
			t.Fatal("nobody has helped")
		}
	}
}

// Who is not killed keeps its memory, and who has little is left to the kernel.
func TestHelpNobody(t *testing.T) {
	cmd := program(t, "private")
	if n, of := begin(func() ([]int, error) { return []int{cmd.Process.Pid, os.Getpid()}, nil })(); n != 0 || of != 1 {
		t.Errorf("%d threads have freed memory of %d processes that live, want none of one", n, of)
	}
	if err := cmd.Process.Signal(syscall.Signal(0)); err != nil {
		t.Error(err)
	}
	Help(t.Context(), func() ([]int, error) { return nil, errors.New("no cgroup") })()
}

// Shared memory of a process that is killed is freed when the process has ended, and not later.
func TestSharedIsFreedAfterTheEnd(t *testing.T) {
	cmd := program(t, "shared")
	before := held(t)
	over := begin(func() ([]int, error) { return []int{cmd.Process.Pid, cmd.Process.Pid}, nil })
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	if now := held(t); now != before+1 {
		t.Errorf("of the process that has ended %d segments are kept, want one", now-before)
	}
	over()
	for end := time.Now().Add(time.Minute); held(t) != before; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("its memory is kept for a minute")
		}
	}
}

// held returns how many segments of shared memory this process has open.
func held(t *testing.T) (n int) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if name, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && name == "/dev/zero (deleted)" {
			n++
		}
	}
	return n
}
