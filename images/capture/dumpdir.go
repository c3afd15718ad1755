// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package capture

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// dumpPrefix begins the names of the dumps' directories, like those of containerd's: by it the shim
// knows that a missing directory means a client that gave up.
const dumpPrefix = "ctrd-checkpoint-gpuckpt-"

func (r *run) makeDumpDir() (err error) {
	if r.dumpDir, r.release, err = makeDumpDir(r.Dir); err != nil {
		return fmt.Errorf("make the directory for the dump: %w", err)
	}
	return nil
}

func (r *run) removeDumpDir() error {
	if r.release == nil {
		return nil
	}
	// In this order: a note has a directory.
	return errors.Join(ignoreNotExist(os.Remove(noteOf(r.dumpDir))), r.release())
}

// makeDumpDir makes a directory for one dump in another, and removes those of killed programs: a
// program that lives holds a lock on its own. release removes the directory.
func makeDumpDir(in string) (dir string, release func() error, err error) {
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
	lock, err := os.Open(dir)
	if err != nil {
		return "", nil, errors.Join(err, os.Remove(dir))
	}
	_ = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) // as above
	return dir, func() error { return errors.Join(os.RemoveAll(dir), lock.Close()) }, nil
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
			err = errors.Join(err, os.RemoveAll(dir))
		}
		f.Close()
	}
	return err
}
