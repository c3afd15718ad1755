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

	"golang.org/x/sys/unix"
)

// hasMemory makes the test's executable a program with much memory.
const hasMemory = "GPUCKPT_TEST_MEMORY"

func TestMain(m *testing.M) {
	if os.Getenv(hasMemory) != "" {
		if _, err := unix.Mmap(-1, 0, least+32<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE); err != nil {
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
func program(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{hasMemory + "=1"}
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
		cmd := program(t)
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
	cmd := program(t)
	if n, of := begin(func() ([]int, error) { return []int{cmd.Process.Pid, os.Getpid()}, nil })(); n != 0 || of != 1 {
		t.Errorf("%d threads have freed memory of %d processes that live, want none of one", n, of)
	}
	if err := cmd.Process.Signal(syscall.Signal(0)); err != nil {
		t.Error(err)
	}
	Help(t.Context(), func() ([]int, error) { return nil, errors.New("no cgroup") })()
}
