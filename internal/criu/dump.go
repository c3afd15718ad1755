// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"fmt"
	"slices"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/cgroup"
	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/inventory"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/netdev"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pstree"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/rlimit"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/seccomp"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/userns"

	"github.com/gpuckpt/gpuckpt/images"
)

// Dump is what CRIU would give to the processes of a restore, as far as it is
// compared with a spec. Nothing in it is to be trusted.
type Dump struct {
	Inventory *inventory.InventoryEntry
	// Tasks are the processes, the container's first one first.
	Tasks   []Task
	Mounts  []*mnt.MntEntry
	Cgroups *cgroup.CgroupEntry
	Seccomp *seccomp.SeccompEntry          // nil without filters
	UserNS  map[uint32]*userns.UsernsEntry // by the ids of the namespaces
	// Torn are connections of which CRIU has one end only.
	Torn []TornSocket
	// NetworkGiven reports whether CRIU wants to be given the network namespace of
	// the first process.
	NetworkGiven bool
}

// Task is one process of a Dump.
type Task struct {
	PID uint32
	// Dead reports whether the process had ended, and waited to be asked for its
	// status. Such a process has no IDs, and may have no thread.
	Dead   bool
	IDs    *criucore.TaskKobjIdsEntry
	Limits []*rlimit.RlimitEntry // by the number of the limit
	// Threads are all threads, the first one first. Only credentials, seccomp and
	// scheduling are kept of each.
	Threads []*criucore.ThreadCoreEntry
}

// taskDead is the state of a zombie (criu/include/criu-compel.h, TASK_DEAD).
const taskDead = 2

// numLimits is how many resource limits there are (RLIM_NLIMITS).
const numLimits = 16

// maxThreads bounds the threads of a dump: each has an image of its own.
const maxThreads = 100_000

// Dump reads what is compared with a spec, as CRIU reads it, and refuses what Copy would refuse in
// any of the images.
func (im *Images) Dump() (*Dump, error) {
	if err := im.Check(); err != nil {
		return nil, err
	}
	d := &Dump{UserNS: make(map[uint32]*userns.UsernsEntry)}
	var err error
	d.Inventory, err = one[inventory.InventoryEntry](im, "inventory.img")
	if err == nil {
		d.Cgroups, err = one[cgroup.CgroupEntry](im, "cgroup.img")
	}
	if err == nil && im.Has("seccomp.img") {
		d.Seccomp, err = one[seccomp.SeccompEntry](im, "seccomp.img")
	}
	if err == nil {
		err = im.readTasks(d)
	}
	if err != nil {
		return nil, err
	}
	if d.Torn, err = im.tornSockets(); err != nil {
		return nil, err
	}
	// CRIU has written what it calls a network namespace that it wants to be given.
	if name := fmt.Sprintf("netns-%d.img", d.Tasks[0].IDs.GetNetNsId()); im.Has(name) {
		n, err := one[netdev.NetnsEntry](im, name)
		if err != nil {
			return nil, err
		}
		d.NetworkGiven = n.GetExtKey() != ""
	}
	if d.Mounts, err = im.allMounts(); err != nil {
		return nil, err
	}
	if len(d.Mounts) == 0 {
		return nil, fmt.Errorf("%w: no image in %s has a mount", images.ErrDamaged, im.dir)
	}
	return d, nil
}

// readTasks reads the processes, and the user namespaces that they are in.
func (im *Images) readTasks(d *Dump) error {
	var tree [][]uint32            // each process's threads, its first thread first
	known := make(map[uint32]bool) // processes and threads
	err := each(im, "pstree.img", func(p *pstree.PstreeEntry) error {
		// A process that has ended has one thread, of the number 0.
		isFirst := func(tid uint32) bool { return tid == p.GetPid() || tid == 0 }
		tids := append([]uint32{p.GetPid()}, slices.DeleteFunc(p.GetThreads(), isFirst)...)
		for _, tid := range tids {
			if known[tid] {
				return fmt.Errorf("it has %d twice", tid)
			}
			known[tid] = true
		}
		if len(known) > maxThreads {
			return fmt.Errorf("it has more than %d threads", maxThreads)
		}
		tree = append(tree, tids)
		return nil
	})
	if err != nil {
		return err
	}
	if len(tree) == 0 {
		return fmt.Errorf("%w: pstree.img in %s has no process", images.ErrDamaged, im.dir)
	}
	for _, tids := range tree {
		t, err := im.readTask(tids)
		if err != nil {
			return err
		}
		if id := t.IDs.GetUserNsId(); id != 0 && id != d.Inventory.GetRootIds().GetUserNsId() && d.UserNS[id] == nil {
			if d.UserNS[id], err = one[userns.UsernsEntry](im, fmt.Sprintf("userns-%d.img", id)); err != nil {
				return err
			}
		}
		d.Tasks = append(d.Tasks, t)
	}
	return nil
}

// readTask reads a process by the ids of its threads, the first of which is its own.
func (im *Images) readTask(tids []uint32) (Task, error) {
	t := Task{PID: tids[0]}
	for i, tid := range tids {
		core, err := one[criucore.CoreEntry](im, fmt.Sprintf("core-%d.img", tid))
		if err != nil {
			return t, err
		}
		if i == 0 {
			t.Dead = core.GetTc().GetTaskState() == taskDead
			limits := core.GetTc().GetRlimits().GetRlimits()
			t.Limits = slices.Clone(limits[:min(len(limits), numLimits)])
		}
		thread := core.GetThreadCore()
		if thread == nil {
			if i == 0 && t.Dead {
				continue
			}
			return t, fmt.Errorf("%w: core-%d.img in %s has no thread", images.ErrDamaged, tid, im.dir)
		}
		t.Threads = append(t.Threads, &criucore.ThreadCoreEntry{
			Creds: thread.Creds, SeccompMode: thread.SeccompMode, SeccompFilter: thread.SeccompFilter,
			SchedPolicy: thread.SchedPolicy, SchedNice: thread.SchedNice,
		})
	}
	if t.Dead {
		return t, nil
	}
	var err error
	t.IDs, err = one[criucore.TaskKobjIdsEntry](im, fmt.Sprintf("ids-%d.img", t.PID))
	return t, err
}
