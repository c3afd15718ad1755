// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package burden refuses a container whose checkpoint would cost the node far more than the container
// itself has: the node pays for the files and for the time, whatever the container's limits are.
package burden

import (
	"cmp"
	"fmt"
	"math"
	"os"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Refuse refuses a container with more of something than a checkpoint may take time for, and one whose
// memory, as CRIU dumps it, has no room in the file system of dir, or is by more than the node's limit
// more than the container takes. The room is an estimate: others take some meanwhile. The container
// should be frozen.
func Refuse(init int, list func() ([]int, error), dir string, forkLimit int64) error {
	pids, err := list()
	if err != nil {
		return err
	}
	if err := RefuseMany(pids); err != nil {
		return err
	}
	room, err := roomIn(dir)
	if err != nil {
		return err
	}
	memory, err := dumped(pids)
	if err != nil {
		return err
	}
	takes, known := host.MemoryUsage(init)
	if !known {
		takes = memory
	}
	if err := refuseMemory(memory, takes, room, uint64(max(forkLimit, 0))); err != nil {
		return fmt.Errorf("the memory of its %d processes takes %s in a dump, with open files that were removed, and %w", len(pids), size(memory), err)
	}
	return nil
}

// refuseMemory refuses memory that has no room, or is too much more than the container takes. A server
// that forks workers, or a program its loaders of data, may have many times what it takes. So the usual
// limit is one of the node, half of the room: whatever a program forks, others have the rest.
func refuseMemory(memory, takes, room, limit uint64) error {
	if memory > room {
		return fmt.Errorf("there is room for %s: free some, or choose another directory: %w: %w", size(room), unix.ENOSPC, errdefs.ErrResourceExhausted)
	}
	limit = cmp.Or(limit, room/2)
	if copies := memory - min(memory, takes); copies > limit {
		return fmt.Errorf("the container takes %s: what they share since a fork is written for each, which may be %s more (fork_limit; by default half of the room): raise it, or let fewer processes share memory so, or have them map it shared (MAP_SHARED): %w",
			size(takes), size(limit), errdefs.ErrFailedPrecondition)
	}
	return nil
}

// roomIn returns the room in the file system of a directory, in bytes. A tmpfs without a size has what
// the machine has.
func roomIn(dir string) (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("look at the room in %s: %w", dir, err)
	}
	if st.Blocks > 0 {
		return st.Bavail * uint64(st.Bsize), nil //nolint:gosec // the kernel's, and no negative one
	}
	if free, known := proc.MemAvailable(); known {
		return free, nil
	}
	return math.MaxUint64, nil
}

// limit bounds what all processes have of something, together, and one of them.
type limit struct {
	what  string
	most  int
	each  int
	count func(pid, most int) (int, error)
	less  string // what makes it less
}

// limits are what takes time for each: CRIU takes some 0.4 ms for a mapping. A process may have 65,530 mappings by
// the kernel's default (vm.max_map_count), 1,048,576 by some distributions'; one of PyTorch has some 2,000. Threads
// are as many as a restore takes. The kernel writes a thread's groups, up to 65,536, into each look at its status.
var limits = []limit{
	{"threads", criu.MaxThreads, criu.MaxThreads, countThreads, "run fewer"},
	{"supplementary groups of threads", 1 << 21, 1 << 21, countGroups, "be in fewer"},
	{"open files", 1 << 20, 1 << 20, proc.CountFiles, "close some"},
	{"mappings of memory", 1 << 20, image.MaxMappings, proc.CountMappings, "map fewer"},
}

// RefuseMany refuses processes that have more of something than they can be looked at for. It takes a
// second or two at most.
func RefuseMany(pids []int) error {
	for _, l := range limits {
		if err := l.refuse(pids); err != nil {
			return err
		}
	}
	return nil
}

func countThreads(pid, _ int) (int, error) {
	status, err := proc.StatusOf(pid)
	return status.Number("Threads"), err
}

func countGroups(pid, most int) (n int, err error) {
	tids, err := proc.Threads(pid)
	for _, tid := range tids {
		status, _ := proc.ThreadStatus(pid, tid) // of one that has ended there is none
		for range strings.FieldsSeq(status.Field("Groups")) {
			n++
		}
		if n > most {
			break
		}
	}
	return n, err
}

func (l *limit) refuse(pids []int) error {
	left := l.most
	for _, pid := range pids {
		n, err := l.count(pid, left+1)
		if err != nil && !proc.Ended(err) {
			return fmt.Errorf("count the %s of process %s: %w", l.what, proc.Describe(pid), err)
		}
		if n > l.each {
			return fmt.Errorf("process %s has more than %d %s: let it %s: %w", proc.Describe(pid), l.each, l.what, l.less, errdefs.ErrFailedPrecondition)
		}
		if left -= n; left < 0 {
			return fmt.Errorf("its processes have more than %d %s together, up to process %s: let them %s: %w", l.most, l.what, proc.Describe(pid), l.less, errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// dumped returns how much a dump of processes has at most, in bytes. CRIU writes what is a process's own
// for each, also where pages are the same since a fork, and shared memory and removed files once. Removed
// files may share what they have on the disk, and the container may have no limit for that.
func dumped(pids []int) (bytes uint64, err error) {
	shared, removed := uint64(0), make(map[inode]bool)
	for _, pid := range pids {
		status, err := proc.StatusOf(pid)
		if err == nil {
			bytes += status.Bytes("RssAnon") + status.Bytes("VmSwap")
			shared = max(shared, status.Bytes("RssShmem"))
			var files uint64
			files, err = removedFiles(pid, removed)
			bytes += files
		}
		if err != nil && !proc.Ended(err) {
			return 0, err
		}
	}
	return bytes + shared, nil
}

type inode struct {
	major, minor uint32
	number       uint64
}

// removedFiles returns how much the files have that a process has open or mapped, no name leads to, and are
// not known yet.
func removedFiles(pid int, known map[inode]bool) (bytes uint64, err error) {
	files, err := proc.Names(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return 0, err
	}
	segments, err := proc.SegmentDevice() // what is shared memory is known
	if err != nil {
		return 0, err
	}
	gone := func(name string) bool { return strings.HasSuffix(name, " (deleted)") }
	look := func(at string) {
		var st unix.Statx_t
		// A file system that does not answer is not asked.
		if unix.Statx(unix.AT_FDCWD, at, unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE|unix.STATX_INO|unix.STATX_NLINK|unix.STATX_SIZE|unix.STATX_BLOCKS, &st) != nil {
			return // it has been closed
		}
		if of := (inode{st.Dev_major, st.Dev_minor, st.Ino}); st.Nlink == 0 && st.Mode&unix.S_IFMT == unix.S_IFREG && unix.Mkdev(of.major, of.minor) != segments && !known[of] {
			known[of] = true
			bytes += min(st.Size, st.Blocks*512)
		}
	}
	for _, fd := range files {
		at := fmt.Sprintf("/proc/%d/fd/%s", pid, fd)
		if to, _ := os.Readlink(at); gone(to) {
			look(at)
		}
	}
	_, err = proc.Maps(pid, func(m *proc.Mapping) bool {
		if m.Inode > 0 && gone(m.Path) {
			look(m.File(pid))
		}
		return false
	})
	return bytes, err
}

func size(bytes uint64) string { return units.BytesSize(float64(bytes)) }
