// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package lanes tells restores that copy GPU state at once how many they are, so that each has its
// share of the node's processors.
//
// A thread that copies for the driver waits for the next copy without a system call. More of them
// than there are processors take these from each other: the driver waits for the thread that has the
// last piece of a copy, and that one for a processor.
//
// The life of a Lane: Take makes a file in a directory that all shims of the node share, and locks it
// (flock). Leave removes it. A file that nobody has locked is that of a shim that has died.
package lanes

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Dir is where lanes lie: a directory for each cgroup of [staging], of which a node has one.
const Dir = "/run/gpuckpt/lanes"

// Lane is one restore's; nil is that of a restore that counts for itself alone.
type Lane struct{ file *os.File }

// Take takes a lane among the restores of a node, by its cgroup of [staging].
func Take(cgroup string) (*Lane, error) {
	// A path's parts become one name.
	return take(filepath.Join(Dir, "lanes"+strings.ReplaceAll(filepath.Clean("/"+cgroup), "/", ":")))
}

func take(dir string) (*Lane, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := os.CreateTemp(dir, "lane-")
	if err != nil {
		return nil, err
	}
	l := &Lane{f}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		l.Leave()
		return nil, err
	}
	return l, nil
}

// AtOnce returns how many restores have a lane, this one included. One that takes its lane at the same
// moment may be missed.
func (l *Lane) AtOnce() int {
	if l == nil {
		return 1
	}
	dir := filepath.Dir(l.file.Name())
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 1
	}
	n := 1
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if path != l.file.Name() && taken(path) {
			n++
		}
	}
	return n
}

// taken reports whether a lane's shim lives, and removes the lane otherwise.
func taken(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	err = unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	if err == nil {
		_ = os.Remove(path)
	}
	return errors.Is(err, unix.EWOULDBLOCK)
}

// Leave ends the lane. It may be called for nil, and again.
func (l *Lane) Leave() {
	if l == nil {
		return
	}
	_ = os.Remove(l.file.Name())
	_ = l.file.Close()
}
