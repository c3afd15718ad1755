// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package quota has the operations of a node share what all of them need: the memory of the cgroup of
// [staging], and the node's processors.
//
// The life of a claim: Take makes a file in a directory that all shims of the node share, and locks
// the file (flock). Give removes it. A file that nobody has locked is that of a shim that has died:
// whoever finds it removes it.
package quota

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Dir is where claims lie. It goes with a reboot, as those who have claimed do.
const Dir = "/run/gpuckpt/quota"

// folder returns the directory for claims of a kind in a cgroup of [staging], of which a node has one.
func folder(kind, cgroup string) string {
	// A path's parts become one name.
	return filepath.Join(Dir, kind+strings.ReplaceAll(filepath.Clean("/"+cgroup), "/", ":"))
}

// claim makes a locked file with a text.
func claim(dir, text string) (*os.File, error) {
	f, err := os.CreateTemp(dir, "claim-")
	if err != nil {
		return nil, err
	}
	if err = unix.Flock(int(f.Fd()), unix.LOCK_EX); err == nil {
		_, err = f.WriteString(text)
	}
	if err != nil {
		give(f)
		return nil, err
	}
	return f, nil
}

// give ends a claim. It may be called again.
func give(f *os.File) {
	_ = os.Remove(f.Name())
	_ = f.Close()
}

// claims returns the texts of the claims in a directory by their paths, and removes those of shims that
// have died.
func claims(dir string) (map[string]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	all := make(map[string]string)
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		text, taken, err := read(path)
		if err != nil {
			return nil, err
		}
		if taken {
			all[path] = text
		}
	}
	return all, nil
}

// read returns the text of a claim, and whether its shim lives.
func read(path string) (text string, taken bool, err error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return "", false, nil // given back meanwhile
	}
	if err != nil {
		return "", false, err
	}
	defer f.Close()
	switch err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); {
	case err == nil:
		_ = os.Remove(path)
		return "", false, nil
	case !errors.Is(err, unix.EWOULDBLOCK):
		return "", false, err
	}
	data, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return "", false, nil
	}
	return string(data), err == nil, err
}
