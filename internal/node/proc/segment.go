// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"fmt"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// A segment of shared memory is a file of a tmpfs that nobody has mounted: what memfd_create(2) makes,
// shmget(2), and mmap(2) with MAP_SHARED and MAP_ANONYMOUS. CUDA's page-locked memory is the latter.

// SegmentDevice returns the device number of the files that segments are.
var SegmentDevice = sync.OnceValues(func() (uint64, error) {
	fd, err := unix.MemfdCreate("gpuckpt", unix.MFD_CLOEXEC)
	if err != nil {
		return 0, fmt.Errorf("find the device of shared memory: %w", err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	return st.Dev, err
})

// IsSegment reports whether a mapping is of a segment, and shared, that the process can read and write.
func (m *Mapping) IsSegment() bool {
	if !strings.HasPrefix(m.Permissions, "rw") || m.Permissions[3] != 's' {
		return false
	}
	device, err := SegmentDevice()
	return err == nil && m.Device == fmt.Sprintf("%02x:%02x", unix.Major(device), unix.Minor(device))
}

// File is where a process shows the file of a mapping.
func (m *Mapping) File(pid int) string {
	return fmt.Sprintf("/proc/%d/map_files/%x-%x", pid, m.Start, m.End)
}

// MapsSealed reports whether a process has a memfd mapped shared that is sealed against writing.
func MapsSealed(pid int) (bool, error) {
	mappings, err := Maps(pid, func(m *Mapping) bool {
		return m.Permissions[3] == 's' && strings.HasPrefix(m.Path, "/memfd:")
	})
	for _, m := range mappings {
		fd, err := unix.Open(m.File(pid), unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			continue // it has been unmapped
		}
		seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
		unix.Close(fd)
		if err == nil && seals&unix.F_SEAL_WRITE != 0 {
			return true, nil
		}
	}
	return false, err
}
