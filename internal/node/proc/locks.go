// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

// Lock is a file lock or lease as the kernel lists it, see proc_locks(5).
type Lock struct {
	Kind string // "POSIX", "FLOCK", "OFDLCK" or "LEASE", and others
	Mode string // "ADVISORY"; of a lease "ACTIVE" or "BREAKING"
	Type string // "READ", "WRITE"; of a lease that is being broken what is to become of it, also "UNLCK"
	// PID is the process that took the lock, -1 for an OFDLCK. It may have ended, and another may have
	// the descriptor.
	PID    int
	Device string // of the file, "fd:00"
	Inode  uint64
	Start  int64
	End    string // the last byte, "EOF" for all that follow
}

// mostLocks is how many of the machine's locks are read. Any program may take a million of them, and the
// kernel begins at the first one again for each page that is read: 200,000 take minutes.
const mostLocks = 1 << 15

// Locks lists those of the machine's locks that are wanted, without those that programs wait for. The
// error is ErrTooMuch where there are more than are read.
func Locks(wanted func(*Lock) bool) ([]Lock, error) {
	f, err := os.Open("/proc/locks")
	if err != nil {
		return nil, fmt.Errorf("list the file locks: %w", err)
	}
	defer f.Close()
	locks, err := parseLocks(f, mostLocks, wanted)
	if err != nil {
		return nil, fmt.Errorf("list the file locks: %w", err)
	}
	return locks, nil
}

// FileLocks lists the locks that a process has by one of its descriptors.
func FileLocks(pid, fd int) ([]Lock, error) {
	lines, err := FileInfo(pid, fd, "lock:\t")
	if err != nil {
		return nil, fmt.Errorf("list the locks of file %d of process %d: %w", fd, pid, err)
	}
	return parseLocks(strings.NewReader(strings.Join(lines, "\n")), len(lines), func(*Lock) bool { return true })
}

// FileInfo returns what lines of a descriptor's fdinfo have behind a prefix. Of an epoll or an inotify
// there is a line for each file, of which a program may have a million.
func FileInfo(pid, fd int, prefix string) (lines []string, err error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/fdinfo/%d", pid, fd))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if lines, err = behind(f, prefix); err != nil {
		return nil, fmt.Errorf("read fdinfo/%d of process %d: %w", fd, pid, err)
	}
	return lines, nil
}

// behind returns the rest of those lines that begin with a prefix.
func behind(r io.Reader, prefix string) (rests []string, err error) {
	kept := Bound(0)
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		if rest, ok := strings.CutPrefix(lines.Text(), prefix); ok {
			rests = append(rests, rest)
			if err := kept.Take(rest); err != nil {
				return nil, err
			}
		}
	}
	return rests, lines.Err()
}

// parseLocks reads lines of /proc/locks, and returns the locks that are wanted. It leaves out those that
// programs wait for.
func parseLocks(r io.Reader, most int, wanted func(*Lock) bool) ([]Lock, error) {
	var locks []Lock
	lines := bufio.NewScanner(r)
	for n := 0; lines.Scan(); n++ {
		if n == most {
			return nil, fmt.Errorf("more than %d: %w", most, ErrTooMuch)
		}
		line := lines.Text()
		// 1: POSIX  ADVISORY  WRITE 359 00:13:11691 0 EOF
		f := strings.Fields(line)
		if len(f) > 1 && f[1] == "->" {
			continue
		}
		if len(f) != 8 {
			return nil, fmt.Errorf("line %q: not a file lock", line)
		}
		l := Lock{Kind: f[1], Mode: f[2], Type: f[3], End: f[7]}
		colon := strings.LastIndexByte(f[5], ':')
		var perr, ierr, serr error
		l.PID, perr = strconv.Atoi(f[4])
		l.Device = f[5][:max(colon, 0)]
		l.Inode, ierr = strconv.ParseUint(f[5][colon+1:], 10, 64)
		l.Start, serr = strconv.ParseInt(f[6], 10, 64)
		if perr != nil || ierr != nil || serr != nil {
			return nil, fmt.Errorf("line %q: not a file lock", line)
		}
		if wanted(&l) {
			locks = append(locks, l)
		}
	}
	return locks, lines.Err()
}
