// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package ptrace

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// idleEnv makes the test's executable a process with several threads, all idle.
const idleEnv = "GPUCKPT_TEST_IDLE"

func TestMain(m *testing.M) {
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
func idler(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), idleEnv+"=1")
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
