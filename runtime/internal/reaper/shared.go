// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package reaper

import (
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// mostSegments bounds what hold has open.
const mostSegments = 1024

// hold keeps the shared memory of processes that are about to be killed beyond their end: the kernel frees
// it when nobody has it any more, on one thread for each segment, and that takes three times as long as
// what the end takes then. let has threads free it, and waits for none. The node must have as much
// memory free: whoever is told of the end may need it at once.
func hold(pids []int) (let func()) {
	var fds []int
	total, known := uint64(0), make(map[uint64]bool)
	for _, pid := range pids {
		if status, err := proc.StatusOf(pid); err != nil || status.Bytes("RssShmem") < least {
			continue
		}
		maps, _ := proc.Maps(pid, (*proc.Mapping).IsSegment)
		for _, m := range maps {
			if known[m.Inode] || len(fds) == mostSegments {
				continue
			}
			fd, err := unix.Open(m.File(pid), unix.O_PATH|unix.O_CLOEXEC, 0)
			if err != nil {
				continue
			}
			known[m.Inode], fds = true, append(fds, fd)
			var st unix.Stat_t
			if unix.Fstat(fd, &st) == nil {
				total += uint64(st.Blocks) * 512
			}
		}
	}
	var next atomic.Int64
	let = func() {
		for range min(most, len(fds)) {
			go func() {
				for i := next.Add(1) - 1; i < int64(len(fds)); i = next.Add(1) - 1 {
					_ = unix.Close(fds[i])
				}
			}()
		}
	}
	if free, ok := proc.MemAvailable(); !ok || total > free {
		let()
		return func() {}
	}
	return let
}
