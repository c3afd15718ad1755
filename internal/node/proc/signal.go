// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Signal sends a signal to a process of which is returns true. The process is known by a pidfd from
// before is is asked: another process that gets its number gets no signal. It is no error that the
// process has ended.
func Signal(pid int, signal unix.Signal, is func(pid int) bool) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if err == nil {
		defer unix.Close(fd)
		if !is(pid) {
			return nil
		}
		err = unix.PidfdSendSignal(fd, signal, nil, 0)
	}
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("send %s to process %s: %w", unix.SignalName(signal), Describe(pid), err)
	}
	return nil
}

// IsChild reports whether a process is a child of this one.
func IsChild(pid int) bool {
	status, err := StatusOf(pid)
	return err == nil && status.Parent() == unix.Getpid()
}
