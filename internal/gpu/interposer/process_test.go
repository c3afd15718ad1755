// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package interposer

import (
	"bytes"
	"encoding/binary"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// cloneArgs is struct clone_args of clone3(2).
type cloneArgs struct {
	flags, pidfd, childTID, parentTID, exitSignal, stack, stackSize, tls, setTID, setTIDSize, cgroup uint64
}

// forkAs forks this process, with a number if it is not 0. The child waits for signals.
//
//go:norace
func forkAs(t *testing.T, pid int32) int {
	t.Helper()
	args := cloneArgs{exitSignal: uint64(unix.SIGCHLD)}
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
	t.Cleanup(func() {
		if _, err := unix.Wait4(int(child), nil, unix.WNOHANG, nil); err == nil {
			_ = unix.Kill(int(child), unix.SIGKILL)
			_, _ = unix.Wait4(int(child), nil, 0, nil)
		}
	})
	return int(child)
}

// A process with an interposer ends, and another one, which has the same at the same place, gets its number.
func TestNumberOfAnother(t *testing.T) {
	block := mapped(t)
	pid := forkAs(t, 0)
	binary.LittleEndian.PutUint32(block[offTID:], uint32(pid))
	c, err := Find(pid)
	if err != nil || c == nil {
		t.Fatalf("%v, %v", c, err)
	}
	defer c.Close()
	if _, err := c.read(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Wait4(pid, nil, 0, nil); err != nil {
		t.Fatal(err)
	}
	other := forkAs(t, int32(pid))
	before := bytes.Clone(block[:controlLen])
	if request, err := c.begin(askPark, within(time.Second)); !proc.Ended(err) {
		t.Errorf("got request %#x and %v, want that the process has ended", request, err)
	}
	if err := c.write(offCancelled, 1); !proc.Ended(err) {
		t.Errorf("write: %v, want that the process has ended", err)
	}
	if _, err := c.descriptors(1, mayBeMemory); !proc.Ended(err) {
		t.Errorf("descriptors: %v, want that the process has ended", err)
	}
	if err := c.process.signal(c.TID, unix.SIGKILL); !proc.Ended(err) {
		t.Errorf("signal: %v, want that the process has ended", err)
	}
	if !bytes.Equal(before, block[:controlLen]) {
		t.Error("the other process's memory has changed")
	}
	if ended, err := unix.Wait4(other, nil, unix.WNOHANG, nil); ended != 0 || err != nil {
		t.Errorf("the other process has ended, or not been there: %d, %v", ended, err)
	}
}

// A thread's number that is another process's is not signalled.
func TestThreadOfAnother(t *testing.T) {
	block := mapped(t)
	pid, other := forkAs(t, 0), forkAs(t, 0)
	binary.LittleEndian.PutUint32(block[offTID:], uint32(pid))
	c, err := Find(pid)
	if err != nil || c == nil {
		t.Fatalf("%v, %v", c, err)
	}
	defer c.Close()
	if err := c.process.signal(other, unix.SIGKILL); !proc.Ended(err) {
		t.Errorf("got %v, want that there is no such thread", err)
	}
	if ended, err := unix.Wait4(other, nil, unix.WNOHANG, nil); ended != 0 || err != nil {
		t.Errorf("the other process has ended: %d, %v", ended, err)
	}
	if err := c.process.signal(c.TID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Wait4(pid, nil, 0, nil); err != nil {
		t.Error(err)
	}
}
