// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package burden refuses a container whose checkpoint would cost the node far more than the container
// itself has: the node pays for the files and for the time, whatever the container's limits are.
package burden

import (
	"fmt"
	"math"

	"github.com/containerd/errdefs"
	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

const (
	// mostMappings bounds the mappings of all processes together. CRIU takes some 0.4 ms for each. A
	// process may have 65,530 by default (vm.max_map_count); one of PyTorch has some 2,000.
	mostMappings = 1 << 20
	// multiple and beside bound the memory that a dump has, by that which the container takes. Processes
	// share memory after a fork, and CRIU writes it for each: a server with its workers has a few times
	// what it takes.
	multiple, beside = 8, 1 << 30
)

// Refuse refuses a container with more mappings than a checkpoint may take time for, and one whose
// memory, as CRIU dumps it, is much more than the container takes, or has no room in the file system
// of dir. The room is an estimate: others take some meanwhile. The container should be frozen.
func Refuse(init int, list func() ([]int, error), dir string) error {
	pids, err := list()
	if err != nil {
		return err
	}
	if err := refuseMappings(pids, mostMappings); err != nil {
		return err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("look at the room in %s: %w", dir, err)
	}
	room := uint64(math.MaxUint64)
	if st.Blocks > 0 { // a tmpfs without a size has none
		room = st.Bavail * uint64(st.Bsize) //nolint:gosec // the kernel's, and no negative one
	}
	memory, err := dumped(pids)
	if err != nil {
		return err
	}
	if memory > room {
		return fmt.Errorf("the memory of its %d processes takes %s in a dump and %s has room for %s: free some, or choose another directory: %w: %w",
			len(pids), size(memory), dir, size(room), unix.ENOSPC, errdefs.ErrResourceExhausted)
	}
	takes, known := host.MemoryUsage(init)
	if known && memory > beside && (memory-beside)/multiple > takes {
		return fmt.Errorf("the memory of its %d processes takes %s in a dump, where what they share since a fork is written for each, and the container takes %s: let fewer processes share memory so, or have them map it shared (MAP_SHARED): %w",
			len(pids), size(memory), size(takes), errdefs.ErrFailedPrecondition)
	}
	return nil
}

func refuseMappings(pids []int, most int) error {
	left := most
	for _, pid := range pids {
		n, err := proc.CountMappings(pid, left+1)
		if err != nil && !proc.Ended(err) {
			return fmt.Errorf("count the mappings of process %s: %w", proc.Describe(pid), err)
		}
		if left -= n; left < 0 {
			return fmt.Errorf("its processes have more than %d mappings of memory together, up to process %s: let them map fewer: %w", most, proc.Describe(pid), errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// dumped returns how much memory a dump of processes has at most, in bytes. CRIU writes what is a
// process's own for each, also where pages are the same since a fork, and shared memory once.
func dumped(pids []int) (bytes uint64, err error) {
	shared := uint64(0)
	for _, pid := range pids {
		status, err := proc.StatusOf(pid)
		if proc.Ended(err) {
			continue
		}
		if err != nil {
			return 0, err
		}
		bytes += status.Bytes("RssAnon") + status.Bytes("VmSwap")
		shared = max(shared, status.Bytes("RssShmem"))
	}
	return bytes + shared, nil
}

func size(bytes uint64) string { return units.BytesSize(float64(bytes)) }
