// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// EachSocket calls do with a copy of each socket that a process has open and its protocol, as socket(2)
// has it. A copy that do does not keep is closed.
func EachSocket(pid int, do func(socket, protocol int) (keep bool)) error {
	files, err := OpenFiles(pid, "socket:")
	if err != nil || len(files) == 0 {
		return err
	}
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return fmt.Errorf("look at the sockets of process %d: %w", pid, err)
	}
	defer unix.Close(process)
	for fd := range files {
		s, err := unix.PidfdGetfd(process, fd, 0)
		if errors.Is(err, unix.EBADF) { // closed meanwhile
			continue
		}
		if err != nil {
			return fmt.Errorf("look at the sockets of process %d: %w", pid, err)
		}
		protocol, err := unix.GetsockoptInt(s, unix.SOL_SOCKET, unix.SO_PROTOCOL)
		if err != nil || !do(s, protocol) {
			_ = unix.Close(s)
		}
	}
	return nil
}

// HasSocket reports whether a process has a socket of a protocol open.
func HasSocket(pid, protocol int) (has bool, err error) {
	err = EachSocket(pid, func(_, p int) bool {
		has = has || p == protocol
		return false
	})
	return has, err
}
