// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package ptrace

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// idleEnv makes the test's executable a process with several threads, all idle.
const idleEnv = "GPUCKPT_TEST_IDLE"

func TestMain(m *testing.M) {
	if action := os.Getenv(filterEnv); action != "" {
		filterCall(action)
	}
	if os.Getenv(idleEnv) != "" {
		for range 3 {
			go func() {
				runtime.LockOSThread()
				_ = unix.Pause()
			}()
		}
		_ = unix.Pause()
	}
	os.Exit(m.Run())
}

// idler starts that process and waits for its threads.
func idler(t *testing.T, env ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), append(env, idleEnv+"=1")...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if tids, err := Threads(cmd.Process.Pid); err == nil && len(tids) >= 4 {
			return cmd
		}
	}
	t.Fatal("it has no threads")
	return nil
}

// Who waits for a process's first thread, and traces another one of it, hears that
// the process was killed.
func TestKilledWhileWaitedFor(t *testing.T) {
	cmd := idler(t)
	pid := cmd.Process.Pid
	tids, err := Threads(pid)
	if err != nil {
		t.Fatal(err)
	}
	other := tids[len(tids)-1]
	heard := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: its end detaches
		for _, tid := range []int{other, pid} {
			err := Seize(pid, tid, 0)
			if err == nil {
				err = AwaitInterrupt(tid)
			}
			if err != nil {
				heard <- err
				return
			}
		}
		if err := errors.Join(unix.PtraceCont(pid, 0), cmd.Process.Kill()); err != nil {
			heard <- err
			return
		}
		_, err := waitStop(pid)
		heard <- err
	}()
	select {
	case err = <-heard:
	case <-time.After(20 * time.Second):
		t.Error("it still waits")
		// So that the process can end.
		if _, err := unix.Wait4(other, nil, unix.WALL, nil); err != nil {
			t.Fatal(err)
		}
		err = <-heard
	}
	if !errors.Is(err, ErrEnded) {
		t.Errorf("it heard %v", err)
	}
}

// filterEnv makes that process filter a call that it never makes itself, with the action named.
const filterEnv = "GPUCKPT_TEST_FILTER"

func filterCall(action string) {
	result, err := strconv.ParseUint(action, 0, 32)
	if err != nil {
		panic(err)
	}
	program := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_SOCKETPAIR, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: uint32(result)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	prog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	flags := uintptr(unix.SECCOMP_FILTER_FLAG_TSYNC)
	if result == unix.SECCOMP_RET_USER_NOTIF { // somebody could answer, and nobody does
		flags |= unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_TSYNC_ESRCH
	}
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&prog))); errno != 0 {
		panic(errno)
	}
}

// A filter of the program's, which would kill it for a call that is not its own, or have it wait
// for an answer, does not see the call. Afterwards it is in force.
func TestSeccomp(t *testing.T) {
	for name, action := range map[string]uint32{
		"errno": unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM), "kill thread": unix.SECCOMP_RET_KILL_THREAD, "kill process": unix.SECCOMP_RET_KILL_PROCESS,
		"trap": unix.SECCOMP_RET_TRAP, "trace": unix.SECCOMP_RET_TRACE, "notify": unix.SECCOMP_RET_USER_NOTIF,
	} {
		t.Run(name, func(t *testing.T) {
			cmd := idler(t, fmt.Sprintf("%s=%#x", filterEnv, action))
			pid := cmd.Process.Pid
			for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
				if status, _ := proc.StatusOf(pid); status.Number("Seccomp") == 2 {
					break
				}
			}
			file, err := os.Open("/dev/null")
			if err != nil {
				t.Fatal(err)
			}
			defer file.Close()
			errs := InThreads([]ThreadID{{pid, pid}}, nil, func(_ int, thread *Thread) error {
				fd, err := thread.sendFD(file) // which makes a socket pair in it
				if err != nil {
					return err
				}
				_, err = thread.Syscall(unix.SYS_CLOSE, fd)
				return err
			})
			if errs[0] != nil {
				t.Fatal(errs[0])
			}
			status, err := proc.StatusOf(pid)
			if err != nil || status.Ended() || status.Number("Seccomp") != 2 || status.Tracer() != 0 {
				t.Errorf("afterwards its status is %s, %v", status, err)
			}
		})
	}
}

// A SIGSTOP in the middle of a call of ours does not break the call, and is not lost: the process is
// stopped when its thread is let go.
func TestStopInACall(t *testing.T) {
	cmd := idler(t)
	pid := cmd.Process.Pid
	errs := InThreads([]ThreadID{{pid, pid}}, nil, func(_ int, thread *Thread) error {
		if err := unix.Tgkill(pid, pid, unix.SIGSTOP); err != nil {
			return err
		}
		for range 3 {
			if got, err := thread.Syscall(unix.SYS_GETPID); err != nil || int(got) != pid {
				return fmt.Errorf("getpid: %d, error %w", got, err)
			}
		}
		return nil
	})
	if errs[0] != nil {
		t.Fatal(errs[0])
	}
	state := func(want string) {
		t.Helper()
		var status proc.Status
		for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(time.Millisecond) {
			if status, _ = proc.StatusOf(pid); strings.HasPrefix(status.Field("State"), want) {
				return
			}
		}
		t.Fatalf("its status is %s, want the state %s", status, want)
	}
	state("T")
	if err := unix.Kill(pid, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	state("S")
}

// A thread of another process than the one named is not touched.
func TestForeignThread(t *testing.T) {
	one, other := idler(t), idler(t)
	tids, err := Threads(other.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	for _, tid := range tids {
		errs := InThreads([]ThreadID{{one.Process.Pid, tid}}, nil, func(int, *Thread) error { return nil })
		if errs[0] == nil || !strings.Contains(errs[0].Error(), "not of process") {
			t.Errorf("thread %d: error %v", tid, errs[0])
		}
	}
	if status, err := proc.StatusOf(other.Process.Pid); err != nil || status.Tracer() != 0 || status.Ended() {
		t.Errorf("the other's status is %s, %v", status, err)
	}
}

// A thread that this process holds is not taken for one that a debugger has.
func TestHeldHere(t *testing.T) {
	cmd := idler(t)
	pid := cmd.Process.Pid
	held, done := make(chan error), make(chan struct{})
	go func() {
		runtime.LockOSThread() // never unlocked: its end detaches
		held <- Seize(pid, pid, 0)
		<-done
	}()
	defer close(done)
	if err := <-held; err != nil {
		t.Fatal(err)
	}
	if err := Seize(pid, pid, 0); !errors.Is(err, errHeldHere) {
		t.Errorf("error %v, want %v", err, errHeldHere)
	}
}

// counted is memory without the code that is looked for.
type counted struct{ bytes int }

func (c *counted) ReadAt(b []byte, _ int64) (int, error) {
	c.bytes += len(b)
	return len(b), nil
}

// A program with thousands of mappings of code is not read for minutes.
func TestSearchIsBounded(t *testing.T) {
	var maps []proc.Mapping
	for i := range uint64(5000) {
		maps = append(maps, proc.Mapping{Start: i << 30, End: i<<30 + 64<<20, Permissions: "r-xp", Path: "/x"})
	}
	mem := new(counted)
	if _, _, err := gadgetsIn(maps, mem); !errors.Is(err, errNoGadget) {
		t.Errorf("error %v", err)
	}
	if mem.bytes > maxCode {
		t.Errorf("%d bytes were read", mem.bytes)
	}
}
