// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"strings"

	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/proc"
)

// shmemHuge is what decides whether files in memory get huge pages.
const shmemHuge = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"

// Room is the free space of a node for checkpoints, in bytes.
type Room struct {
	// Memory that programs can still take.
	Memory uint64
	// Temp is the directory where containerd has the images of a checkpoint or
	// restore during the operation; InMemory reports that it lies on a tmpfs.
	Temp     string
	TempFree uint64
	InMemory bool
	// Root is containerd's directory, where checkpoint images are kept.
	Root     string
	RootFree uint64
}

// CheckMemory looks at the memory and the disks that checkpoints take.
func CheckMemory(n *Node, root string) ([]Check, Room) {
	a := area{name: "memory"}
	r := Room{Memory: n.available(), Root: root}
	if r.Memory == 0 {
		a.add(Warning, "free", "/proc/meminfo has no MemAvailable", "whether a checkpoint fits is not known", "mount -t proc proc /proc")
	} else {
		found := units.BytesSize(float64(r.Memory))
		if n.StagingLimit > 0 {
			found += ", of which GPU state may take " + units.BytesSize(float64(n.StagingLimit)) + " ([staging] memory_limit)"
		}
		a.ok("free", "%s", found)
	}
	// The shim makes its pages huge itself, where that is not forbidden.
	switch mode := chosen(n.read(shmemHuge)); mode {
	case "", "deny":
		if mode == "" {
			mode = "not there"
		}
		a.add(Warning, "huge pages", mode+" in "+shmemHuge, "GPU state is kept in small pages: checkpoints take up to twice as long", "echo never >"+shmemHuge)
	default:
		a.ok("huge pages", "used by the shim (it needs no setting; %s is %s)", shmemHuge, mode)
	}
	// As Go's os.MkdirTemp and containerd (plugins/services/tasks) choose it.
	for _, dir := range []string{n.env("XDG_RUNTIME_DIR"), n.env("TMPDIR"), "/tmp"} {
		if dir != "" {
			r.Temp = dir
			break
		}
	}
	r.TempFree = n.free(r.Temp)
	kind := "a disk"
	if mounts, err := n.mounts(); err == nil {
		if m := mountOf(mounts, r.Temp); m != nil && m.FSType == "tmpfs" {
			r.InMemory, kind = true, "tmpfs"
		}
	}
	found := fmt.Sprintf("%s, on %s, %s free", r.Temp, kind, units.BytesSize(float64(r.TempFree)))
	if r.TempFree == 0 {
		a.add(Failure, "images meanwhile", found, "containerd cannot put the images of a checkpoint there", "# set TMPDIR in containerd's environment to a directory with room")
	} else {
		a.ok("images meanwhile", "%s", found)
	}
	if root != "" {
		r.RootFree = n.free(root)
		a.ok("images", "%s, %s free", root, units.BytesSize(float64(r.RootFree)))
	}
	return a.checks, r
}

// available returns the memory that programs can take without swapping, in bytes; 0 if
// it is not known.
func (n *Node) available() uint64 {
	bytes, _ := proc.MemAvailable([]byte(n.read("proc/meminfo")))
	return bytes
}

// free returns the room in a directory's file system, in bytes; 0 if there is none,
// or no such directory.
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
