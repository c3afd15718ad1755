// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	criucgroup "github.com/checkpoint-restore/go-criu/v8/crit/images/cgroup"
	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/inventory"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pstree"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/seccomp"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/userns"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/images"
)

// The first words of CRIU's images (criu/include/magic.h).
const (
	magicCommon    = 0x54564319
	magicService   = 0x55105940
	magicInventory = 0x58313116
	magicPstree    = 0x50273030
	magicCore      = 0x55053847
	magicIDs       = 0x54432030
	magicMounts    = 0x55563928
	magicCgroup    = 0x59383330
	magicSeccomp   = 0x64413049
	magicUserns    = 0x55474906
	magicNetwork   = 0x55933752
)

// maxImage bounds each image that is read here, in bytes: a process takes some
// kilobytes, a mount 200 bytes. In memory an image may take fifty times as much.
// maxImages bounds all of them.
const (
	maxImage  = 4 << 20
	maxImages = 256 << 20
)

// dumped is what of a dump is compared with a spec. Whoever made it may have
// written anything into it.
type dumped struct {
	inventory *inventory.InventoryEntry
	tasks     []dumpedTask
	mounts    []*mnt.MntEntry
	cgroups   *criucgroup.CgroupEntry
	seccomp   *seccomp.SeccompEntry // nil without filters
	userns    map[uint32]*userns.UsernsEntry
	// networkGiven says that CRIU wants to be given the first process's network.
	networkGiven bool
}

// dumpedTask is one process.
type dumpedTask struct {
	pid  uint32
	ids  *criucore.TaskKobjIdsEntry
	core *criucore.CoreEntry
	// threads are those of the first thread as well.
	threads []*criucore.ThreadCoreEntry
}

// readDumped reads it as CRIU does: the first of what should be one is what
// CRIU takes, so that more than one is refused.
func readDumped(path string) (*dumped, error) {
	d := &dumped{userns: make(map[uint32]*userns.UsernsEntry)}
	dir := &imageDir{path: path, left: maxImages}
	var err error
	if d.inventory, err = one[inventory.InventoryEntry](dir, "inventory.img", magicInventory); err != nil {
		return nil, err
	}
	if d.cgroups, err = one[criucgroup.CgroupEntry](dir, "cgroup.img", magicCgroup); err != nil {
		return nil, err
	}
	if _, err := os.Lstat(filepath.Join(path, "seccomp.img")); !errors.Is(err, os.ErrNotExist) {
		if d.seccomp, err = one[seccomp.SeccompEntry](dir, "seccomp.img", magicSeccomp); err != nil {
			return nil, err
		}
	}
	tree, err := all[pstree.PstreeEntry](dir, "pstree.img", magicPstree)
	if err != nil {
		return nil, err
	}
	known := make(map[uint32]bool) // processes and threads
	for _, p := range tree {
		t := dumpedTask{pid: p.GetPid()}
		for _, id := range append([]uint32{t.pid}, slices.DeleteFunc(slices.Clone(p.GetThreads()), func(tid uint32) bool { return tid == t.pid })...) {
			if known[id] {
				return nil, fmt.Errorf("%w: pstree.img has %d twice", images.ErrDamaged, id)
			}
			known[id] = true
		}
		if t.core, err = one[criucore.CoreEntry](dir, fmt.Sprintf("core-%d.img", t.pid), magicCore); err != nil {
			return nil, err
		}
		if t.core.GetThreadCore() == nil && t.core.GetTc().GetTaskState() != taskDead {
			return nil, fmt.Errorf("%w: process %d has no thread", images.ErrDamaged, t.pid)
		}
		t.threads = append(t.threads, t.core.GetThreadCore())
		for _, tid := range p.GetThreads() {
			if tid == t.pid {
				continue
			}
			thread, err := one[criucore.CoreEntry](dir, fmt.Sprintf("core-%d.img", tid), magicCore)
			if err != nil {
				return nil, err
			}
			if thread.GetThreadCore() == nil {
				return nil, fmt.Errorf("%w: thread %d has no registers", images.ErrDamaged, tid)
			}
			t.threads = append(t.threads, thread.GetThreadCore())
		}
		if t.core.GetTc().GetTaskState() != taskDead {
			if t.ids, err = one[criucore.TaskKobjIdsEntry](dir, fmt.Sprintf("ids-%d.img", t.pid), magicIDs); err != nil {
				return nil, err
			}
		}
		if id := t.ids.GetUserNsId(); id != 0 && id != d.inventory.GetRootIds().GetUserNsId() && d.userns[id] == nil {
			if d.userns[id], err = one[userns.UsernsEntry](dir, fmt.Sprintf("userns-%d.img", id), magicUserns); err != nil {
				return nil, err
			}
		}
		d.tasks = append(d.tasks, t)
	}
	if len(d.tasks) == 0 {
		return nil, fmt.Errorf("%w: pstree.img has no process", images.ErrDamaged)
	}
	if d.networkGiven, err = readNetwork(dir, d.tasks[0].ids.GetNetNsId()); err != nil {
		return nil, err
	}
	names, err := filepath.Glob(filepath.Join(path, "mountpoints-*.img"))
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("%w: CRIU's mountpoints image is missing in %s", images.ErrDamaged, path)
	}
	for _, name := range names {
		m, err := all[mnt.MntEntry](dir, filepath.Base(name), magicMounts)
		if err != nil {
			return nil, err
		}
		d.mounts = append(d.mounts, m...)
	}
	return d, nil
}

// taskDead is the state of a zombie (criu/include/criu-compel.h, TASK_DEAD).
const taskDead = 2

// message is a protobuf message that is made of T.
type message[T any] interface {
	*T
	proto.Message
}

// one reads an image that holds one entry.
func one[T any, M message[T]](dir *imageDir, name string, magic uint32) (M, error) {
	entries, err := all[T, M](dir, name, magic)
	if err != nil {
		return nil, err
	}
	if len(entries) != 1 {
		return nil, fmt.Errorf("%w: %s has %d entries, not one", images.ErrDamaged, name, len(entries))
	}
	return entries[0], nil
}

// imageDir is a directory of images, of which so many bytes may be read yet.
type imageDir struct {
	path string
	left int64
}

// all reads an image.
func all[T any, M message[T]](dir *imageDir, name string, magic uint32) ([]M, error) {
	path := filepath.Join(dir.path, name)
	st, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%w: CRIU's %s is missing in %s: %w", images.ErrDamaged, name, dir.path, os.ErrNotExist)
	}
	if err != nil {
		return nil, fmt.Errorf("read CRIU's images: %w", err)
	}
	if !st.Mode().IsRegular() || st.Size() > maxImage {
		return nil, fmt.Errorf("%w: %s is no regular file, or larger than %d bytes", images.ErrDamaged, path, maxImage)
	}
	if dir.left -= st.Size(); dir.left < 0 {
		return nil, fmt.Errorf("%w: the images in %s that tell of processes have more than %d bytes", images.ErrDamaged, dir.path, maxImages)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read CRIU's images: %w", err)
	}
	entries, err := parseImage[T, M](data, magic)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", images.ErrDamaged, path, err)
	}
	return entries, nil
}

// parseImage takes an image apart: one or two words that say what it is, then
// messages, each behind its length.
func parseImage[T any, M message[T]](data []byte, magic uint32) ([]M, error) {
	word := func() (w uint32) {
		if len(data) >= 4 {
			w, data = binary.LittleEndian.Uint32(data), data[4:]
		}
		return w
	}
	first := word()
	if first == magicCommon || first == magicService { // all but the inventory have it
		first = word()
	}
	if first != magic {
		return nil, fmt.Errorf("it begins with %#x, and is no image of its kind", first)
	}
	var entries []M
	for len(data) > 0 {
		if len(data) < 4 {
			return nil, errors.New("it is cut short")
		}
		size := binary.LittleEndian.Uint32(data)
		if data = data[4:]; uint64(size) > uint64(len(data)) {
			return nil, errors.New("it is cut short")
		}
		m := M(new(T))
		if err := proto.Unmarshal(data[:size], m); err != nil {
			return nil, err
		}
		entries = append(entries, m)
		data = data[size:]
	}
	return entries, nil
}
