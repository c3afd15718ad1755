// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Who waits for a process's first thread, and traces another one of it, hears that
// the process was killed.
func TestKilledWhileWaitedFor(t *testing.T) {
	cmd, _ := spinner(t)
	pid := cmd.Process.Pid
	tids, err := threads(pid)
	if err != nil {
		t.Fatal(err)
	}
	other := tids[len(tids)-1]
	heard := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: its end detaches
		for _, tid := range []int{other, pid} {
			err := seize(pid, tid, 0)
			if err == nil {
				err = awaitInterrupt(tid)
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
	if !errors.Is(err, errEnded) {
		t.Errorf("it heard %v", err)
	}
}
