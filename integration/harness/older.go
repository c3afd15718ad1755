// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"os"
	"path/filepath"
)

// OlderContainerds are the versions of containerd beside the newest that are
// supported: the first starts shims in the way of those before 2.3.
var OlderContainerds = []string{"2.2", "2.3"}

// WithContainerd gives the programs with the containerd of a version, "2.2", and its
// ctr in the place of the newest, by links in a directory, which must exist. The
// error is fs.ErrNotExist where they are not there.
func (b Bins) WithContainerd(version, dir string) (Bins, error) {
	for _, program := range []string{"containerd", "ctr"} {
		path, err := b.Path(program + "-" + version)
		if err == nil {
			err = os.Symlink(path, filepath.Join(dir, program))
		}
		if err != nil {
			return Bins{}, fmt.Errorf("use containerd %s: %w", version, err)
		}
	}
	return NewBins(append([]string{dir}, b.dirs...)...)
}
