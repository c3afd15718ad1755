// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package interposer

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// process is a process of a container's, by descriptors: its number may be another process's by now.
type process struct {
	pid int
	fd  *os.File // a pidfd
	mem *os.File // its memory; empty once it has ended, or executes another program
}

// openProcess returns a process, which is the caller's to close. The error is proc.Ended if there is none.
func openProcess(pid int) (_ *process, err error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.EINVAL) { // a thread's number, or none at all
		err = unix.ESRCH
	}
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	p := &process{pid: pid, fd: os.NewFile(uintptr(fd), "process")}
	if p.mem, err = os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0); err == nil && !p.lives() {
		err = unix.ESRCH // it is the memory of another one, maybe
	}
	if err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

// close can be called on nil.
func (p *process) close() {
	if p == nil {
		return
	}
	p.fd.Close()
	if p.mem != nil {
		p.mem.Close()
	}
}

// lives reports whether the process has its number still.
func (p *process) lives() bool { return unix.PidfdSendSignal(int(p.fd.Fd()), 0, nil, 0) == nil }

// access reads or writes the process's memory.
func (p *process) access(at uint64, data []byte, write bool) (err error) {
	if write {
		_, err = p.mem.WriteAt(data, int64(at)) //nolint:gosec // an address of user space
	} else {
		_, err = p.mem.ReadAt(data, int64(at)) //nolint:gosec // an address of user space
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = unix.ESRCH // the memory of a process that has ended is empty
	}
	if err != nil {
		return fmt.Errorf("the interposer of process %d: %w", p.pid, err)
	}
	return nil
}

// pidfdThread is PIDFD_THREAD (Linux 6.9): the pidfd is a thread's, and so is a signal sent by it.
const pidfdThread = unix.O_EXCL

// signal sends a signal to a thread of the process, and to no other's.
func (p *process) signal(tid int, signal unix.Signal) error {
	thread, err := unix.PidfdOpen(tid, pidfdThread)
	if err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("wake the interposer of process %d: %w", p.pid, err)
	}
	if !p.lives() {
		return fmt.Errorf("wake the interposer of process %d: %w", p.pid, unix.ESRCH)
	}
	// The process has had its number all the while, so the thread that has this number in it is its own.
	if err != nil { // an older kernel
		return unix.Tgkill(p.pid, tid, signal)
	}
	defer unix.Close(thread)
	if _, err := os.Stat(fmt.Sprintf("/proc/%d/task/%d", p.pid, tid)); err != nil {
		return fmt.Errorf("wake the interposer of process %d: %w", p.pid, unix.ESRCH)
	}
	return unix.PidfdSendSignal(thread, signal, nil, 0)
}
