// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// maxLinks bounds a chain of links, as the kernel does.
const maxLinks = 40

// ResolveMounts makes one mount of several of one driver file at links to one another, such as
// libcuda.so.1 and libcuda.so.580.65.06 in a mounted directory of the host. runc follows the links:
// it would mount the file twice at one place, and CRIU knows a mount by its place.
func ResolveMounts(spec *specs.Spec) {
	var kept []specs.Mount
	for _, m := range spec.Mounts {
		if IsBind(m) && IsDriverFile(m.Destination) {
			m.Destination = resolveIn(kept, m.Destination)
			if slices.ContainsFunc(kept, func(k specs.Mount) bool { return k.Destination == m.Destination && sameFile(k.Source, m.Source) }) {
				continue
			}
		}
		kept = append(kept, m)
	}
	spec.Mounts = kept
}

// resolveIn follows links from a name to others of its directory, in what is mounted there.
func resolveIn(mounts []specs.Mount, name string) string {
	for range maxLinks {
		at := -1
		for i, m := range mounts {
			if strings.HasPrefix(path.Clean(name), path.Clean(m.Destination)+"/") {
				at = i // a later one covers it
			}
		}
		if at < 0 || !IsBind(mounts[at]) {
			return name
		}
		below := strings.TrimPrefix(path.Clean(name), path.Clean(mounts[at].Destination))
		to, err := os.Readlink(filepath.Join(mounts[at].Source, below))
		if err != nil || to != filepath.Base(to) || to == "." || to == ".." {
			return name
		}
		name = path.Join(path.Dir(name), to)
	}
	return name
}

func sameFile(a, b string) bool {
	one, err := os.Stat(a)
	if err != nil {
		return false
	}
	other, err := os.Stat(b)
	return err == nil && os.SameFile(one, other)
}
