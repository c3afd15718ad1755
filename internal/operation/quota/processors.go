// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"os"
	"path/filepath"
)

// Processors is the claim of one restore that copies GPU state. By such claims restores know how many
// they are, and each has its share of the node's processors: a thread that copies for the driver waits
// for the next copy without a system call, so more threads than processors take these from each other.
// nil is the claim of a restore that counts for itself alone.
type Processors struct{ file *os.File }

// TakeProcessors claims a share of the processors among the restores of a node, by its cgroup of
// [staging].
func TakeProcessors(cgroup string) (*Processors, error) {
	return takeProcessors(folder("processors", cgroup))
}

func takeProcessors(dir string) (*Processors, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := claim(dir, "")
	if err != nil {
		return nil, err
	}
	return &Processors{f}, nil
}

// AtOnce returns how many restores have a share, this one included. AtOnce may miss a restore that
// takes its share at the same moment.
func (p *Processors) AtOnce() int {
	if p == nil {
		return 1
	}
	all, err := claims(filepath.Dir(p.file.Name()))
	if err != nil {
		return 1
	}
	delete(all, p.file.Name())
	return 1 + len(all)
}

// Give gives the share back. It may be called for nil, and again.
func (p *Processors) Give() {
	if p != nil {
		give(p.file)
	}
}
