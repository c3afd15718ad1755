// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package tmpfs

import (
	"path"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// ShmImage is the file of a checkpoint that has what was mounted at /dev/shm from outside.
const ShmImage = "gpuckpt-dev-shm.img"

// ShmPath is where that is mounted.
const ShmPath = "/dev/shm"

// Carries reports whether the content of a spec's /dev/shm comes from outside the container: Main
// then opens the checkpoint's directory, which is a descriptor of the shim's.
func Carries(spec *specs.Spec) bool { return outsideShm(spec) != "" }

// outsideShm returns the directory of the host that a spec mounts at /dev/shm, if its content is to
// travel: "" if there is none. In a pod that is the tmpfs that all its containers share, or a volume
// in memory. The node's own /dev/shm is none, and in a user namespace owners would be others.
func outsideShm(spec *specs.Spec) (dir string) {
	for _, m := range spec.Mounts {
		if path.Clean("/"+m.Destination) != ShmPath {
			continue
		}
		dir = ""
		if m.Type == "bind" || slices.Contains(m.Options, "bind") || slices.Contains(m.Options, "rbind") {
			dir = m.Source
		}
	}
	if dir == "" || spec.Linux != nil && len(spec.Linux.UIDMappings) > 0 {
		return ""
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
		return ""
	}
	var st, node unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return ""
	}
	if err := unix.Stat(ShmPath, &node); err == nil && node.Dev == st.Dev {
		return ""
	}
	return dir
}
