// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// fakeEnv makes the test's executable one of the processes of a restore.
const fakeEnv = "GPUCKPT_TEST_FAKE"

func init() {
	if os.Getenv(fakeEnv) != "" {
		runtime.LockOSThread() // TestMain is on the first thread
	}
}

func TestMain(m *testing.M) {
	switch what, rest, _ := strings.Cut(os.Getenv(fakeEnv), ","); what {
	case "":
		os.Exit(m.Run())
	case "runc": // the others are its children
		for child := range strings.SplitSeq(rest, ",") {
			startFake(child, 0)
		}
	case "criu traces":
		traceAndKill(0)
	case "criu traces init":
		traceAndKill(unix.CLONE_NEWPID)
	case "criu packs":
		startFake("packs", 0)
	case "packs":
		fmt.Println("works")
		for end := time.Now().Add(3 * time.Second); time.Now().Before(end); { // longer than the test looks
		}
		os.Exit(0)
	case "ended":
		fmt.Println("ends")
		os.Exit(0)
	}
	fmt.Println("sleeps")
	time.Sleep(time.Minute)
	os.Exit(0)
}

// startFake starts one as a child of this process, and waits until it is where it
// stays. The program of those that begin with criu has that name, and its arguments
// follow a colon.
func startFake(what string, namespaces uintptr) *exec.Cmd {
	path, args := "/proc/self/exe", ""
	if rest, isRunc := strings.CutPrefix(what, "runc of "); isRunc {
		id, children, _ := strings.Cut(rest, ",")
		what, args = "runc,"+children, "checkpoint "+id
	}
	if strings.HasPrefix(what, "criu") {
		what, args, _ = strings.Cut(what, ":")
		dir, err := os.MkdirTemp("", "gpuckpt-criu-")
		if err == nil {
			defer os.RemoveAll(dir)
			path = filepath.Join(dir, "criu")
			err = os.Symlink("/proc/self/exe", path)
		}
		if err != nil {
			panic(err)
		}
	}
	cmd := exec.Command(path, strings.Fields(args)...)
	cmd.Env = append(os.Environ(), fakeEnv+"="+what)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: namespaces}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err == nil {
		_, err = bufio.NewReader(out).ReadString('\n')
	}
	if err != nil {
		panic(err)
	}
	return cmd
}

// traceAndKill traces all threads of a process, kills it, and waits for the first of
// them, as CRIU does: for ever.
func traceAndKill(namespaces uintptr) {
	runtime.LockOSThread()
	pid := startFake("victim", namespaces).Process.Pid
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil || len(tasks) < 2 {
		panic(fmt.Sprint(tasks, err))
	}
	for _, task := range tasks {
		tid, err := strconv.Atoi(task.Name())
		if err != nil {
			panic(err)
		}
		if _, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(tid), 0, 0, 0, 0); errno != 0 {
			panic(errno)
		}
	}
	fmt.Println("waits")
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		panic(err)
	}
	_, err = unix.Wait4(pid, nil, unix.WALL, nil)
	panic(fmt.Sprint("the wait has ended ", err))
}

// CRIU is ended when it waits for a process that was killed, and what a killed CRIU
// leaves is. The error says so; other processes are left alone.
func TestWatch(t *testing.T) {
	const interval = 50 * time.Millisecond
	failed := errors.New("criu failed")
	for _, test := range []struct {
		name, processes string // those of runc, or one that is the shim's own
		restoring       bool
		ended           string // "" if all are to be left alone
	}{
		{"traces the dead", "runc,criu traces:swrk 3", true, "was killed while CRIU had it"},
		{"traces a dead container", "runc,criu traces init:swrk 3", true, "was killed while CRIU had it"},
		{"waits for a dead container", "runc,criu:swrk 3,ended", true, "was killed while CRIU had it"},
		{"traces the dead in a dump", "runc,criu traces:swrk 3", false, "was killed while CRIU had it"},
		{"waits for nobody in a dump", "runc,criu:swrk 3,ended", false, ""},
		{"is at work", "runc,criu:swrk 3,restored", true, ""},
		{"left by a killed one", "criu:swrk 3", false, "CRIU was killed"},
		{"checks features", "criu:check --feature x", true, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			cmd := startFake(test.processes, 0)
			criu := cmd.Process.Pid
			if found := proc.Children(criu); len(found) > 0 {
				criu = found[0]
			}
			t.Cleanup(func() {
				for _, pid := range append(proc.Children(cmd.Process.Pid), cmd.Process.Pid) {
					_ = unix.Kill(pid, unix.SIGKILL)
				}
				_ = cmd.Wait()
			})
			w := startWatch(t.Context(), "a", test.restoring, time.Hour, interval)
			wait := 20 * time.Second
			if test.ended == "" {
				wait = 2 * dumpLooks * interval
			}
			ended := false
			for began := time.Now(); !ended && time.Since(began) < wait; time.Sleep(time.Millisecond) {
				status, _ := proc.StatusOf(criu)
				ended = status.Ended()
			}
			err := w.Stop(failed)
			if ended != (test.ended != "") {
				t.Errorf("ended: %t, %v", ended, err)
			}
			if test.ended != "" {
				wantError(t, err, test.ended)
			}
			if !errors.Is(err, failed) {
				t.Errorf("the error is lost: %v", err)
			}
		})
	}
}

// Where runc only says that something was cut off, the error says what that means.
func TestCutOff(t *testing.T) {
	for text, means := range map[string]string{
		"exit status 1: read unixpacket @->@: EOF path= /x.log":                           "CRIU was killed",
		"exit status 1: read unixpacket @->@: recvmsg: connection reset by peer path= /x": "CRIU was killed",
		"exit status 1: write unixpacket @->@: write: broken pipe":                        "CRIU was killed",
		"exit status 1: readlink /proc/4711/fd/0: no such file or directory":              "CRIU was killed",
		"runc did not terminate successfully: exit status 137:  path= /x.log":             "runc was killed",
		"criu failed: type DUMP errno 0 path= /x.log":                                     "",
	} {
		failed := errors.New(text)
		err := StartWatch(t.Context(), "a", false, time.Hour).Stop(failed)
		if !errors.Is(err, failed) || (err.Error() == text) != (means == "") {
			t.Errorf("%q became %v", text, err)
		}
		if means != "" {
			wantError(t, err, means)
		}
	}
	if err := StartWatch(t.Context(), "a", false, time.Hour).Stop(nil); err != nil {
		t.Error(err)
	}
}

// A dump in which nobody does anything is ended, when its time is over: neither CRIU nor what it has
// started. Another container's runc and CRIU are left alone, whether they work or wait.
func TestWatchIdle(t *testing.T) {
	failed := errors.New("criu failed")
	for _, test := range []struct {
		processes, others string
		restoring, left   bool
	}{
		{"runc of a,criu:swrk 3", "runc of b,criu:swrk 3", false, false},
		{"runc of a,criu:swrk 3", "runc of b,criu packs:swrk 3", false, false},
		{"runc of a,criu packs:swrk 3", "runc of b,criu:swrk 3", false, true},
		{"runc of a,criu:swrk 3", "runc of b,criu:swrk 3", true, true},
	} {
		start := func(processes string) int {
			cmd := startFake(processes, 0)
			criu := proc.Children(cmd.Process.Pid)
			t.Cleanup(func() {
				for _, pid := range append(criu, cmd.Process.Pid) {
					_ = unix.Kill(pid, unix.SIGKILL)
				}
				_ = cmd.Wait()
			})
			if len(criu) != 1 {
				t.Fatalf("runc has %v", criu)
			}
			return criu[0]
		}
		hasEnded := func(pid int) bool {
			status, _ := proc.StatusOf(pid)
			return status.Ended()
		}
		criu, other := start(test.processes), start(test.others)
		ended, idle, wait := false, 600*time.Millisecond, 10*time.Second
		if test.left { // a program at work may wait for a processor
			idle, wait = 2*time.Second, 4*time.Second
		}
		w := startWatch(t.Context(), "a", test.restoring, idle, 20*time.Millisecond)
		for began := time.Now(); !ended && time.Since(began) < wait; time.Sleep(time.Millisecond) {
			ended = hasEnded(criu)
		}
		err := w.Stop(failed)
		if ended == test.left || errors.Is(err, ErrHangs) == test.left || !errors.Is(err, failed) {
			t.Errorf("%+v: ended %t, %v", test, ended, err)
		}
		if hasEnded(other) {
			t.Errorf("%+v: another container's CRIU was ended", test)
		}
	}
}
