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

// Room is the free space of a node for checkpoints, in bytes.
type Room struct {
	Memory uint64 // that programs can still take; 0 if it is not known
	// Temp is where containerd has the images of a checkpoint or restore meanwhile.
	Temp     string
	TempFree uint64
	// Root is containerd's directory, where checkpoint images are kept.
	Root     string
	RootFree uint64
}

func size(bytes uint64) string { return units.BytesSize(float64(bytes)) }

// CheckMemory looks at the memory and the disks that checkpoints take.
func CheckMemory(n *Node, root string) ([]Check, Room) {
	a := area{name: "memory"}
	r := Room{Root: root, Temp: cmp.Or(n.env("XDG_RUNTIME_DIR"), n.env("TMPDIR"), "/tmp")} // as Go's os.MkdirTemp and containerd (plugins/services/tasks) choose it
	r.Memory, _ = proc.MemAvailable([]byte(n.read("proc/meminfo")))
	found := size(r.Memory)
	if n.StagingLimit > 0 {
		found += ", of which GPU state may take " + size(n.StagingLimit) + " ([staging] memory_limit)"
	}
	a.either(r.Memory > 0, "free", found,
		Warning, "/proc/meminfo has no MemAvailable", "whether a checkpoint fits is not known", "mount -t proc proc /proc")
	// The shim makes its pages huge itself, where that is not forbidden.
	mode, fix := cmp.Or(chosen(n.read(shmemHuge)), "not there"), "echo never >"+shmemHuge
	if mode == "not there" {
		fix = "# boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE=y"
	}
	a.either(mode != "deny" && mode != "not there", "huge pages", fmt.Sprintf("used by the shim (it needs no setting; %s is %s)", shmemHuge, mode),
		Warning, mode+" in "+shmemHuge, "GPU state is kept in small pages: checkpoints take up to twice as long", fix)
	r.TempFree = n.free(r.Temp)
	kind := "a disk"
	if mounts, err := n.mounts(); err == nil && typeOf(mounts, r.Temp) == "tmpfs" {
		kind = "tmpfs"
	}
	found = fmt.Sprintf("%s, on %s, %s free", r.Temp, kind, size(r.TempFree))
	a.either(r.TempFree > 0, "images meanwhile", found,
		Failure, found, "containerd cannot put the images of a checkpoint there", "# set TMPDIR in containerd's environment to a directory with room")
	if root != "" {
		r.RootFree = n.free(root)
		a.ok("images", "%s, %s free", root, size(r.RootFree))
	}
	return a.checks, r
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
