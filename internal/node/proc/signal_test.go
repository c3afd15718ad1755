// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"strconv"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// forkAs forks this process, with a number if it is not 0. The child waits for signals.
//
//go:norace
func forkAs(t *testing.T, pid int32) int {
	t.Helper()
	args := struct { // clone_args of linux/sched.h
		_          [4]uint64
		exitSignal uint64
		_          [3]uint64
		setTID     uint64
		setTIDSize uint64
		_          uint64
	}{exitSignal: uint64(unix.SIGCHLD)}
	if pid != 0 {
		args.setTID, args.setTIDSize = uint64(uintptr(unsafe.Pointer(&pid))), 1
	}
	child, _, errno := unix.RawSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(&args)), unsafe.Sizeof(args), 0)
	if errno == 0 && child == 0 {
		for { // no goroutine of another thread's is here
			unix.RawSyscall(unix.SYS_PAUSE, 0, 0, 0)
		}
	}
	if errno != 0 {
		t.Fatalf("fork as process %d (the tests need root): %v", pid, errno)
	}
	return int(child)
}

// end ends a child, and reports whether it lived.
func end(pid int) (lived bool) {
	ended, err := unix.Wait4(pid, nil, unix.WNOHANG, nil)
	if lived = ended == 0 && err == nil; lived {
		_ = unix.Kill(pid, unix.SIGKILL)
		_, _ = unix.Wait4(pid, nil, 0, nil)
	}
	return lived
}

// A process gets a signal if it is the one that is meant when it is asked, and only then.
func TestSignal(t *testing.T) {
	pid := forkAs(t, 0)
	if err := Signal(pid, 0, IsChild); err != nil { // it is there
		t.Error(err)
	}
	stopped := func() bool { // or it is about to be
		status, err := StatusOf(pid)
		pending, perr := strconv.ParseUint(status.Field("ShdPnd"), 16, 64)
		return err != nil || perr != nil || pending != 0 || Stopped(pid, pid)
	}
	if err := Signal(pid, unix.SIGSTOP, func(int) bool { return false }); err != nil || stopped() {
		t.Errorf("the process is not the one that was meant: %v", err)
	}
	// It ends, and another one has its number, between the look and the signal.
	gone := func(int) bool {
		end(pid)
		forkAs(t, int32(pid))
		return true
	}
	if err := Signal(pid, unix.SIGSTOP, gone); err != nil {
		t.Error(err)
	}
	if stopped() {
		t.Error("another process got the signal")
	}
	if !end(pid) {
		t.Error("there was no other process")
	}
	if err := Signal(pid, unix.SIGKILL, func(int) bool { return true }); err != nil {
		t.Errorf("of a process that has ended: %v", err)
	}
}
