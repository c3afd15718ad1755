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

// spillPrefix begins the names of directories with the GPU state of suspended containers. The container's
// record (package journal) names its own, for the case that the shim dies before it removes it.
const spillPrefix = "gpuckpt-spill-"

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

// MakeSpillDir makes a directory in parent for the container of this name.
func MakeSpillDir(parent, name string) (dir string, err error) {
	dir = filepath.Join(parent, spillPrefix+name)
	if err := os.Mkdir(dir, 0o700); errors.Is(err, os.ErrExist) {
		return "", fmt.Errorf("%s is there already, from a container of this name whose node or shim has died: remove it: %w", dir, errdefs.ErrAlreadyExists)
	} else if err != nil {
		return "", fmt.Errorf("make a directory for the GPU state: %w", err)
	}
	return dir, nil
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
