// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// shmemHuge is what decides whether files in memory get huge pages.
const shmemHuge = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"

func size(bytes uint64) string { return units.BytesSize(float64(bytes)) }

// CheckMemory looks at the memory and the disks that checkpoints take, of which root is containerd's. It
// returns the memory that programs can still take, in bytes; 0 if it is not known.
func CheckMemory(n *Node, root string) ([]Check, uint64) {
	a := area{name: "memory"}
	free, _ := proc.ParseMemAvailable([]byte(n.read("proc/meminfo")))
	found := size(free)
	if n.StagingLimit > 0 {
		found += ", of which GPU state may take " + size(n.StagingLimit) + " ([staging] memory_limit)"
	}
	a.either(free > 0, "free", found,
		Warning, "/proc/meminfo has no MemAvailable", "whether a checkpoint fits is not known", "mount -t proc proc /proc")
	// The shim makes its pages huge itself, where that is not forbidden.
	mode, fix := cmp.Or(chosen(n.read(shmemHuge)), "not there"), "echo never >"+shmemHuge
	if mode == "not there" {
		fix = "# boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE=y"
	}
	a.either(mode != "deny" && mode != "not there", "huge pages", fmt.Sprintf("used by the shim (it needs no setting; %s is %s)", shmemHuge, mode),
		Warning, mode+" in "+shmemHuge, "GPU state is kept in small pages: checkpoints take up to twice as long", fix)
	temp := cmp.Or(n.env("XDG_RUNTIME_DIR"), n.env("TMPDIR"), "/tmp") // as Go's os.MkdirTemp and containerd (plugins/services/tasks) choose it
	kind, room := "a disk", n.free(temp)
	if mounts, err := n.mounts(); err == nil && typeOf(mounts, temp) == "tmpfs" {
		kind = "tmpfs"
	}
	found = fmt.Sprintf("%s, on %s, %s free", temp, kind, size(room))
	a.either(room > 0, "images meanwhile", found,
		Failure, found, "containerd cannot put the images of a checkpoint there", "# set TMPDIR in containerd's environment to a directory with room")
	if root != "" {
		a.ok("images", "%s, %s free", root, size(n.free(root)))
	}
	return a.checks, free
}

// free returns the room in a directory's file system, in bytes; 0 without such a directory.
func (n *Node) free(dir string) uint64 {
	var st unix.Statfs_t
	if err := unix.Statfs(n.path(dir), &st); err != nil {
		return 0
	}
	return st.Bavail * uint64(st.Bsize)
}

// chosen returns the word in brackets of "always [advise] never".
func chosen(text string) string {
	_, rest, _ := strings.Cut(text, "[")
	word, _, _ := strings.Cut(rest, "]")
	return word
}
