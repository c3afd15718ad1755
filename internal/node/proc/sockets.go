// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// CopyOf returns a copy of a file that a process has open. The process may stand still.
func CopyOf(pid, fd int) (int, error) {
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return -1, fmt.Errorf("look at file %d of process %d: %w", fd, pid, err)
	}
	defer unix.Close(process)
	return copyOf(process, pid, fd)
}

func copyOf(process, pid, fd int) (int, error) {
	file, err := unix.PidfdGetfd(process, fd, 0)
	if err != nil {
		return -1, fmt.Errorf("look at file %d of process %d: %w", fd, pid, err)
	}
	return file, nil
}

// Sockets returns the inodes of the sockets that a process has open, by their descriptors.
func Sockets(pid int) (map[int]uint64, error) {
	files, err := OpenFiles(pid, "socket:[")
	inodes := make(map[int]uint64)
	for fd, link := range files {
		if inode, ok := SocketInode(link); ok {
			inodes[fd] = inode
		}
	}
	return inodes, err
}

// SocketInode returns the inode of a socket by the link in /proc of a file, which may be none.
func SocketInode(link string) (uint64, bool) {
	inode, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimPrefix(link, "socket:["), "]"), 10, 64)
	return inode, err == nil
}

// EachSocket calls do with each descriptor of a process that is a socket, a copy of it, and its protocol, as
// socket(2) has it. A copy that do does not keep is closed.
func EachSocket(pid int, do func(fd, socket, protocol int) (keep bool)) error {
	files, err := OpenFiles(pid, "socket:")
	if err != nil {
		return err
	}
	return EachCopy(pid, files, func(fd, s int) bool {
		protocol, err := unix.GetsockoptInt(s, unix.SOL_SOCKET, unix.SO_PROTOCOL)
		return err == nil && do(fd, s, protocol)
	})
}

// EachCopy calls do with descriptors of a process, and a copy of each. A copy that do does not keep is closed.
func EachCopy(pid int, files map[int]string, do func(fd, file int) (keep bool)) error {
	if len(files) == 0 {
		return nil
	}
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return fmt.Errorf("look at files of process %d: %w", pid, err)
	}
	defer unix.Close(process)
	for fd := range files {
		file, err := copyOf(process, pid, fd)
		if errors.Is(err, unix.EBADF) { // closed meanwhile
			continue
		}
		if err != nil {
			return err
		}
		if !do(fd, file) {
			_ = unix.Close(file)
		}
	}
	return nil
}

// Peer returns who is at the other end of a unix socket.
func Peer(conn syscall.Conn) (*unix.Ucred, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	var peer *unix.Ucred
	cerr := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	return peer, cmp.Or(cerr, err)
}
