// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package capture

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// dumpPrefix begins the names of the dumps' directories, like those of containerd's: by it the shim
// knows that a missing directory means a client that gave up.
const dumpPrefix = "ctrd-checkpoint-gpuckpt-"

func (r *run) makeDumpDir() (err error) {
	if r.dumpDir, r.release, err = makeDumpDir(r.Dir, r.memory); err != nil {
		return fmt.Errorf("make the directory for the dump: %w", err)
	}
	return nil
}

func (r *run) removeDumpDir() error {
	if r.release == nil {
		return nil
	}
	if !r.pausedAt.IsZero() { // it could not be resumed: Recover finds it by its note
		return errors.Join(r.release(), os.Mkdir(r.dumpDir, 0o700))
	}
	// In this order: a note has a directory.
	return errors.Join(ignoreNotExist(os.Remove(noteOf(r.dumpDir))), r.release())
}

// makeDumpDir makes a directory for one dump in another, and removes those of killed programs: a
// program that lives holds a lock on its own. With memory, in bytes, the directory is a tmpfs of that
// size, if one can be mounted. release removes the directory.
func makeDumpDir(in string, memory uint64) (dir string, release func() error, err error) {
	// One at a time: before it is locked, another would take the directory for one left over.
	turn, err := os.Open(in)
	if err != nil {
		return "", nil, err
	}
	defer turn.Close() // and with it the lock
	wait := func() error { return unix.Flock(int(turn.Fd()), unix.LOCK_EX) }
	if err = wait(); errors.Is(err, unix.EINTR) { // by a signal of Go's scheduler
		err = wait()
	}
	if err == nil {
		if err := sweepDumpDirs(in); err != nil {
			return "", nil, fmt.Errorf("remove the dump of a program that was killed: %w", err)
		}
	} // else a file system without locks, where it is not known who lives
	if dir, err = os.MkdirTemp(in, dumpPrefix); err != nil {
		return "", nil, err
	}
	if memory > 0 {
		mountMemory(dir, memory)
	}
	lock, err := os.Open(dir) // which is the tmpfs
	if err != nil {
		return "", nil, errors.Join(err, removeDump(dir))
	}
	_ = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) // as above
	return dir, func() error { return errors.Join(removeDump(dir), lock.Close()) }, nil
}

// mountMemory mounts a tmpfs, with huge pages where the kernel has them. Without the right to do so
// nothing is mounted.
func mountMemory(dir string, bytes uint64) {
	options := fmt.Sprintf("mode=0700,size=%d", bytes)
	for _, more := range []string{",huge=advise", ""} {
		if unix.Mount("gpuckpt", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, options+more) == nil {
			return
		}
	}
}

// removeDump removes a dump's directory, and what is mounted there.
func removeDump(dir string) error {
	_ = unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW) // EINVAL: nothing is
	return os.RemoveAll(dir)
}

// spareMemory returns the memory that dumps in a directory may take, in bytes: most of what is available.
// It is 0 if the directory is in memory already, and where the shims would not see what this process mounts.
func spareMemory(ctx context.Context, c *client.Client, dir string) uint64 {
	var in unix.Statfs_t
	err := unix.Statfs(dir, &in)
	if errors.Is(err, unix.ENOENT) { // it will be made
		err = unix.Statfs(filepath.Dir(dir), &in)
	}
	if err != nil || in.Type == unix.TMPFS_MAGIC {
		return 0
	}
	daemon, err := c.IntrospectionService().Server(ctx)
	if err != nil || !sharesMounts(daemon.GetPid(), daemon.GetPidns()) {
		return 0
	}
	available, _ := proc.MemAvailable()
	return available / 4 * 3
}

// sharesMounts reports whether a process, of the pid namespace of that number, sees the same mounts as this
// one.
func sharesMounts(pid, pidns uint64) bool {
	var mine, own, theirs unix.Stat_t
	return unix.Stat("/proc/self/ns/pid", &mine) == nil && mine.Ino == pidns &&
		unix.Stat("/proc/self/ns/mnt", &own) == nil && unix.Stat(fmt.Sprintf("/proc/%d/ns/mnt", pid), &theirs) == nil &&
		own.Ino == theirs.Ino
}

// notDumped is an error before the dumps were complete.
type notDumped struct{ error }

func (e *notDumped) Unwrap() error { return e.error }

// hadNoRoom reports whether a dump failed for want of room. CRIU's log has the C library's words.
func hadNoRoom(err error) bool {
	var e *notDumped
	return errors.As(err, &e) &&
		(errdefs.IsResourceExhausted(err) || strings.Contains(strings.ToLower(err.Error()), unix.ENOSPC.Error()))
}

// sweepDumpDirs removes the dumps' directories that nobody holds, but those with a note, which are
// Recover's.
func sweepDumpDirs(in string) error {
	left, err := filepath.Glob(filepath.Join(in, dumpPrefix+"*"))
	for _, dir := range left {
		f, oerr := os.OpenFile(dir, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
		if errors.Is(oerr, os.ErrNotExist) {
			continue
		}
		if oerr != nil {
			return oerr
		}
		_, noted := os.Stat(noteOf(dir))
		if noted != nil && unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			err = errors.Join(err, removeDump(dir))
		}
		f.Close()
	}
	return err
}
