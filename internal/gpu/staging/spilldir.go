// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package staging

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// SpillDir is a directory that holds the spilled state of one container. Its shim holds a lock on
// it for as long as it lives: one without a lock was left by a crash of the machine.
type SpillDir struct {
	Path string
	note string   // the file that names it
	lock *os.File // the directory itself; nil after Remove
}

// spillPrefix begins the names of such directories. spillNote is the file in the container's bundle
// that names its own, for the case that the shim dies before it removes it.
const (
	spillPrefix = "gpuckpt-spill-"
	spillNote   = "gpuckpt-spill-dir"
)

// CheckSpillParent refuses a directory to spill to that frees no memory.
func CheckSpillParent(dir string) error {
	if st, err := os.Stat(dir); err != nil {
		return fmt.Errorf("spill: %w: %w", err, errdefs.ErrFailedPrecondition)
	} else if !st.IsDir() {
		return fmt.Errorf("spill: %s is no directory: %w", dir, errdefs.ErrFailedPrecondition)
	}
	if OnMemory(dir) {
		return fmt.Errorf("spill: %s is on a tmpfs, which is memory: choose a directory on a disk: %w", dir, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// MakeSpillDir makes a directory in parent for the container of this name, noted in the bundle and locked.
// It removes what shims that have died left in parent.
func MakeSpillDir(parent, name, bundle string) (*SpillDir, error) {
	d := &SpillDir{Path: filepath.Join(parent, spillPrefix+name), note: filepath.Join(bundle, spillNote)}
	// One at a time: between the making and the locking, another shim would take the
	// directory for one that was left.
	turn, err := os.Open(parent)
	if err != nil {
		return nil, fmt.Errorf("make a directory for the GPU state: %w", err)
	}
	defer turn.Close() // and with it the lock
	locks := uninterrupted(func() error { return unix.Flock(int(turn.Fd()), unix.LOCK_EX) }) == nil
	if locks { // else a file system without locks, where it is not known who lives
		if err := sweepSpills(parent); err != nil {
			return nil, fmt.Errorf("remove the GPU state that a crash has left: %w", err)
		}
	}
	if err := os.Mkdir(d.Path, 0o700); errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("%s is there already, from a container of this name whose node or shim has died: remove it: %w", d.Path, errdefs.ErrAlreadyExists)
	} else if err != nil {
		return nil, fmt.Errorf("make a directory for the GPU state: %w", err)
	}
	if d.lock, err = os.Open(d.Path); err == nil && locks {
		err = unix.Flock(int(d.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if err == nil {
		if err = os.WriteFile(d.note, []byte(d.Path), 0o600); err != nil {
			err = fmt.Errorf("remember the spill directory: %w", err)
		}
	}
	if err != nil {
		d.lock.Close()
		return nil, errors.Join(err, os.Remove(d.Path))
	}
	return d, nil
}

// sweepSpills removes the directories that no shim holds.
func sweepSpills(parent string) error {
	left, err := filepath.Glob(filepath.Join(parent, spillPrefix+"*"))
	if err != nil {
		return err
	}
	for _, dir := range left {
		f, err := os.OpenFile(dir, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			err = os.RemoveAll(dir)
		}
		f.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// Remove removes the directory and the note. After an error it can be called again.
func (d *SpillDir) Remove() error {
	if err := os.RemoveAll(d.Path); err != nil {
		return fmt.Errorf("remove the spilled GPU state: %w", err)
	}
	if err := os.Remove(d.note); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("forget the spill directory: %w", err)
	}
	d.lock.Close()
	return nil
}

// RemoveDeadSpill removes the spilled state of a container whose shim has died.
func RemoveDeadSpill(bundle string) error {
	dir, err := os.ReadFile(filepath.Join(bundle, spillNote))
	if err != nil || !IsSpillDir(string(dir)) {
		return nil
	}
	return os.RemoveAll(string(dir))
}

// IsSpillDir reports whether a directory holds spilled state, by its name.
func IsSpillDir(dir string) bool { return strings.HasPrefix(filepath.Base(dir), spillPrefix) }

// OnMemory reports whether a directory is on a file system whose files are memory.
func OnMemory(dir string) bool {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return false
	}
	return st.Type == unix.TMPFS_MAGIC || st.Type == unix.HUGETLBFS_MAGIC
}
