// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package ptrace

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// MapFile maps a file over an area of the process, at the address given, by mmap(2)'s flags.
func (t *Thread) MapFile(f *os.File, start, length, offset uint64, flags uint64) error {
	fd, err := t.sendFD(f)
	if err != nil {
		return err
	}
	if err = mapFixed(t, start, length, flags, fd, offset); err == nil {
		t.PreferHuge(start, length)
	}
	if _, cerr := t.Syscall(unix.SYS_CLOSE, fd); err == nil && cerr != nil {
		err = fmt.Errorf("close the file: %w", cerr)
	}
	if err != nil {
		return fmt.Errorf("map the file over the area: %w", err)
	}
	return nil
}

// PreferHuge asks the kernel for huge pages in an area, if it has any.
func (t *Thread) PreferHuge(start, length uint64) {
	_, _ = t.Syscall(unix.SYS_MADVISE, start, length, unix.MADV_HUGEPAGE)
}

// MapEmpty replaces an area by an empty one.
func (t *Thread) MapEmpty(start, length uint64) error {
	if err := mapFixed(t, start, length, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE, ^uint64(0), 0); err != nil {
		return fmt.Errorf("map an empty area: %w", err)
	}
	return nil
}

func mapFixed(t *Thread, start, length, flags, fd, offset uint64) error {
	at, err := t.Syscall(unix.SYS_MMAP, start, length, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_FIXED|flags, fd, offset)
	if err == nil && at != start {
		err = fmt.Errorf("mapped at %#x, not %#x", at, start)
	}
	return err
}

// sendFD sends the process a descriptor of a file that this process has open, and returns its
// number there. It makes a socket pair in the process for that, so the file needs no name that the
// process could see. The descriptor is close-on-exec; the caller must close it in the process. A
// tracer that dies on the way leaves at most three descriptors open there, all close-on-exec; the
// next tracer's Sweep closes them.
func (t *Thread) sendFD(f *os.File) (fd uint64, err error) {
	ours, theirs, err := t.socketpair()
	if err != nil {
		return 0, err
	}
	defer func() {
		for _, n := range []uint64{ours, theirs} {
			if _, cerr := t.Syscall(unix.SYS_CLOSE, n); err == nil && cerr != nil {
				err = fmt.Errorf("close a socket: %w", cerr)
			}
		}
	}()
	pidfd, err := unix.PidfdOpen(t.PID, 0)
	if err != nil {
		return 0, fmt.Errorf("open process %d: %w", t.PID, err)
	}
	defer unix.Close(pidfd)
	marked := []int{int(f.Fd())}
	for _, n := range []uint64{ours, theirs} {
		sock, err := unix.PidfdGetfd(pidfd, int(n), 0)
		if err != nil {
			return 0, fmt.Errorf("take its socket: %w", err)
		}
		defer unix.Close(sock)
		marked = append(marked, sock)
	}
	for _, fd := range marked {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETSIG, leftSignal); err != nil {
			return 0, fmt.Errorf("mark what is passed: %w", err)
		}
	}
	if err := unix.Sendmsg(marked[1], []byte{0}, unix.UnixRights(int(f.Fd())), nil, unix.MSG_DONTWAIT); err != nil {
		return 0, fmt.Errorf("send the file: %w", err)
	}
	return t.receiveFD(theirs)
}

// leftSignal marks the files and sockets that a tracer sends into a process: it is their signal
// (F_SETSIG), with nobody to send it to (F_SETOWN). No program has a use for that.
const leftSignal = 61

// Sweep closes the descriptors that sendFD has left open in the process because its
// tracer died: CRIU cannot dump a file that the process's mounts do not lead to.
// Sockets without a mark have sent nothing yet, and stay.
func (t *Thread) Sweep() error {
	pidfd, err := unix.PidfdOpen(t.PID, 0)
	if err != nil {
		return fmt.Errorf("open process %d: %w", t.PID, err)
	}
	defer unix.Close(pidfd)
	dir := fmt.Sprintf("/proc/%d/fd", t.PID)
	names, err := proc.Names(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		link, err := os.Readlink(filepath.Join(dir, name))
		if err != nil || strings.HasPrefix(link, "/dev/") || !strings.HasPrefix(link, "/") && !strings.HasPrefix(link, "socket:") {
			continue
		}
		n, err := strconv.Atoi(name)
		if err != nil {
			return err
		}
		fd, err := unix.PidfdGetfd(pidfd, n, 0)
		if err != nil {
			continue
		}
		signal, serr := unix.FcntlInt(uintptr(fd), unix.F_GETSIG, 0)
		owner, oerr := unix.FcntlInt(uintptr(fd), unix.F_GETOWN, 0)
		unix.Close(fd)
		if serr != nil || oerr != nil || signal != leftSignal || owner != 0 {
			continue
		}
		if _, err := t.Syscall(unix.SYS_CLOSE, uint64(n)); err != nil {
			return fmt.Errorf("close what a tracer has left: %w", err)
		}
	}
	return nil
}

func (t *Thread) socketpair() (a, b uint64, err error) {
	_, err = t.run(t.call, unix.SYS_SOCKETPAIR, func(scratch uint64) ([]byte, [6]uint64) {
		return make([]byte, 8), [6]uint64{unix.AF_UNIX, unix.SOCK_DGRAM | unix.SOCK_CLOEXEC, 0, scratch}
	})
	if err != nil {
		return 0, 0, fmt.Errorf("make a socket in it: %w", err)
	}
	var fds [8]byte
	if err := t.read(t.scratch, fds[:]); err != nil {
		return 0, 0, err
	}
	return uint64(binary.LittleEndian.Uint32(fds[:])), uint64(binary.LittleEndian.Uint32(fds[4:])), nil
}

// receiveFD has the thread receive one descriptor. struct msghdr is 56 bytes, an
// iovec 16, the one byte of data 8 for alignment, the control message 24.
func (t *Thread) receiveFD(sock uint64) (uint64, error) {
	const iovAt, dataAt, controlAt, controlLen = 56, 72, 80, 24
	le := binary.LittleEndian
	_, err := t.run(t.call, unix.SYS_RECVMSG, func(scratch uint64) ([]byte, [6]uint64) {
		b := make([]byte, controlAt+controlLen)
		le.PutUint64(b[16:], scratch+iovAt)
		le.PutUint64(b[24:], 1)
		le.PutUint64(b[32:], scratch+controlAt)
		le.PutUint64(b[40:], controlLen)
		le.PutUint64(b[iovAt:], scratch+dataAt)
		le.PutUint64(b[iovAt+8:], 1)
		return b, [6]uint64{sock, scratch, unix.MSG_CMSG_CLOEXEC | unix.MSG_DONTWAIT}
	})
	if err != nil {
		return 0, fmt.Errorf("receive the file in it: %w", err)
	}
	var control [controlLen]byte
	if err := t.read(t.scratch+controlAt, control[:]); err != nil {
		return 0, err
	}
	// struct cmsghdr: length, level, type, then the descriptor.
	if le.Uint64(control[:]) != 20 || le.Uint32(control[8:]) != unix.SOL_SOCKET || le.Uint32(control[12:]) != unix.SCM_RIGHTS {
		return 0, errors.New("it received no file (does it have too many open?)")
	}
	return uint64(le.Uint32(control[16:])), nil
}
