// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package staging

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// memoryFile makes a file of memory without a name, with huge pages for mappings
// that ask for them by madvise. A memfd has huge pages only if the whole machine's
// shmem_enabled says so, which is "never" by default; the driver takes twice as long
// to fill small pages. So the file is made in a tmpfs of its own, which is mounted
// nowhere and goes with the file. If the kernel refuses that, it is a memfd.
func memoryFile() (*os.File, error) {
	if f, err := hugeFile(); err == nil {
		return f, nil
	}
	fd, err := unix.MemfdCreate("gpuckpt-staging", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make memory for the area: %w", err)
	}
	return os.NewFile(uintptr(fd), "gpuckpt-staging"), nil
}

// hugeFile makes a file in a new tmpfs. See fsopen(2), and
// Documentation/filesystems/tmpfs.rst for the options.
func hugeFile() (*os.File, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fs)
	for _, option := range [][2]string{{"huge", "advise"}, {"nr_blocks", "0"}, {"mode", "0700"}} {
		if err := unix.FsconfigSetString(fs, option[0], option[1]); err != nil {
			return nil, err
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, err
	}
	mount, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, err
	}
	defer unix.Close(mount)
	fd, err := unix.Openat(mount, ".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "gpuckpt-staging"), nil
}
