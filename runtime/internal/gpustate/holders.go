// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"fmt"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/mmapfile"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// endHolders ends processes, which must be frozen, that have a file open which a driver's thread was
// lent: none has a use for it, and one on a disk would let its process take the disk. Memory without a
// name is not looked for: it cannot grow, and who writes to it pays.
func endHolders(pids []int, lent []*Lent) error {
	names := make(map[string]*Lent)
	for _, l := range lent {
		if l == nil || memoryWithoutName(l.file) {
			continue
		}
		name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", l.file.Fd()))
		if err != nil {
			return err
		}
		names[name] = l
	}
	if len(names) == 0 {
		return nil
	}
	for _, pid := range pids {
		open, err := proc.OpenFiles(pid, "/")
		if proc.Ended(err) {
			continue
		}
		if err != nil {
			return err
		}
		for fd, name := range open {
			l := names[name]
			if l == nil || !sameFile(l.file, fmt.Sprintf("/proc/%d/fd/%d", pid, fd)) {
				continue
			}
			who := proc.Describe(pid)
			if err := proc.Signal(pid, unix.SIGKILL, func(int) bool { return true }); err != nil { // which is frozen
				return fmt.Errorf("end process %s, which has taken a file that the driver's thread was lent: %w", who, err)
			}
			return fmt.Errorf("process %s had taken the file %s, which the driver's thread was lent for GPU state, and was ended: %w", who, name, errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

func memoryWithoutName(f *os.File) bool {
	var st unix.Stat_t
	return mmapfile.InMemory(f) && unix.Fstat(int(f.Fd()), &st) == nil && st.Nlink == 0
}

// sameFile reports whether a name is that of an open file. It asks no file system that may not answer.
func sameFile(f *os.File, name string) bool {
	var is, of unix.Statx_t
	return unix.Statx(unix.AT_FDCWD, name, unix.AT_STATX_DONT_SYNC, unix.STATX_INO, &is) == nil &&
		unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_INO, &of) == nil &&
		is.Ino == of.Ino && is.Dev_major == of.Dev_major && is.Dev_minor == of.Dev_minor
}
