// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Bits of an entry of /proc/PID/pagemap (Documentation/admin-guide/mm/pagemap.rst).
const (
	pagePresent   = 1 << 63
	pageExclusive = 1 << 56 // mapped by this process alone
	pageFrame     = 1<<55 - 1
)

// SharedHostMemory returns two processes of the group that have the same host memory of the driver
// mapped, by their pids on the host; zeros if there are none. Such memory is made by cuMemCreate,
// exported by one process and imported by the other. The caller must have CAP_SYS_ADMIN.
//
// The kernel module maps host memory by /dev/nvidiactl. What the driver has there for itself is in
// one process alone, but for a page that nobody may write to (measured, driver 580). A forked child
// inherits these mappings and is no CUDA process, so it is not in the group.
func (g Group) SharedHostMemory() (one, other int, err error) {
	if len(g) < 2 {
		return 0, 0, nil
	}
	owner := make(map[uint64]int) // of pages, by their frames
	for _, p := range g {
		pid := p.PID.Host
		frames, err := sharedFrames(pid)
		if err != nil && !proc.Ended(err) {
			return 0, 0, fmt.Errorf("look for shared host memory in process %d: %w", pid, err)
		}
		for frame := range frames {
			if first, ok := owner[frame]; ok {
				return first, pid, nil
			}
			owner[frame] = pid
		}
	}
	return 0, 0, nil
}

// sharedFrames returns the pages of the driver's host memory in a process that other processes have
// mapped as well.
func sharedFrames(pid int) (map[uint64]bool, error) {
	mappings, err := proc.Maps(pid, isHostMemory)
	if err != nil {
		return nil, err
	}
	pagemap, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", pid))
	if err != nil {
		return nil, err
	}
	defer pagemap.Close()
	frames, page := make(map[uint64]bool), uint64(os.Getpagesize())
	for _, m := range mappings {
		entries := make([]byte, (m.End-m.Start)/page*8)
		n, err := pagemap.ReadAt(entries, int64(m.Start/page*8))
		if err != nil && !errors.Is(err, io.EOF) { // it has ended
			return nil, err
		}
		for entries = entries[:n&^7]; len(entries) > 0; entries = entries[8:] {
			entry := binary.NativeEndian.Uint64(entries)
			if entry&pagePresent == 0 || entry&pageExclusive != 0 {
				continue
			}
			if entry&pageFrame == 0 {
				return nil, errors.New("the kernel hides which pages are shared: CAP_SYS_ADMIN is missing")
			}
			frames[entry&pageFrame] = true
		}
	}
	return frames, nil
}

// isHostMemory reports whether a mapping is of host memory of the driver that can be written to.
func isHostMemory(m *proc.Mapping) bool {
	return strings.HasPrefix(m.Path, "/dev/nvidiactl") && strings.HasPrefix(m.Permissions, "rw") && strings.HasSuffix(m.Permissions, "s")
}
