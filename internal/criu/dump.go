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
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
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

// MaxThreads bounds the threads of a dump: each has an image of its own.
const MaxThreads = 100_000

// Dump reads what must be known of a dump as a whole, as CRIU reads it.
func (im *Images) Dump() (*Dump, error) {
	d := &Dump{UserNS: make(map[uint32]*userns.UsernsEntry)}
	var err error
	d.Inventory, err = one[*inventory.InventoryEntry](im, "inventory.img")
	if err == nil {
		d.Cgroups, err = one[*cgroup.CgroupEntry](im, "cgroup.img")
	}
	if err == nil && im.Has("seccomp.img") {
		d.Seccomp, err = one[*seccomp.SeccompEntry](im, "seccomp.img")
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
		n, err := one[*netdev.NetnsEntry](im, name)
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

// OtherUsers reports whether a process has the ids of another user or group than root's, or is in a user
// namespace: the kernel lets a root without CAP_SYS_PTRACE read nothing of such a process in /proc.
func (d *Dump) OtherUsers() bool {
	return len(d.UserNS) > 0 || slices.ContainsFunc(d.Tasks, func(t Task) bool {
		return slices.ContainsFunc(t.Threads, func(th *criucore.ThreadCoreEntry) bool {
			c := th.GetCreds()
			return c.GetUid()|c.GetEuid()|c.GetSuid()|c.GetGid()|c.GetEgid()|c.GetSgid() != 0
		})
	})
}

// readTasks reads the processes, and the user namespaces that they are in.
func (im *Images) readTasks(d *Dump) error {
	var tree []*pstree.PstreeEntry
	total := 0
	err := image.EachOf(im.Set, "pstree.img", func(p *pstree.PstreeEntry) error {
		if total += max(1, len(p.GetThreads())); total > MaxThreads {
			return fmt.Errorf("%w: pstree.img in %s has more than %d threads", images.ErrDamaged, im.dir, MaxThreads)
		}
		tree = append(tree, p)
		return nil
	})
	if err != nil {
		return err
	}
	if len(tree) == 0 {
		return fmt.Errorf("%w: pstree.img in %s has no process", images.ErrDamaged, im.dir)
	}
	known := make(map[uint32]bool) // processes and threads
	processes := map[uint32]bool{0: true}
	for i, p := range tree {
		t, err := im.readTask(p, known)
		if err != nil {
			return err
		}
		// CRIU writes parents first, and believes that.
		if parent := p.GetPpid(); !processes[parent] || (parent == 0) != (i == 0) {
			return fmt.Errorf("%w: pstree.img in %s: the parent of process %d is %d, which does not come before it", images.ErrDamaged, im.dir, p.GetPid(), parent)
		}
		processes[p.GetPid()] = true
		if id := t.IDs.GetUserNsId(); id != 0 && id != d.Inventory.GetRootIds().GetUserNsId() && d.UserNS[id] == nil {
			if d.UserNS[id], err = one[*userns.UsernsEntry](im, fmt.Sprintf("userns-%d.img", id)); err != nil {
				return err
			}
		}
		d.Tasks = append(d.Tasks, t)
	}
	return nil
}

// readTask reads a process. It refuses one, or a thread, that is known already.
func (im *Images) readTask(p *pstree.PstreeEntry, known map[uint32]bool) (Task, error) {
	t := Task{PID: p.GetPid()}
	tids := append([]uint32{p.GetPid()}, slices.DeleteFunc(slices.Clone(p.GetThreads()), func(tid uint32) bool { return tid == p.GetPid() })...)
	for i, tid := range tids {
		if known[tid] {
			return t, fmt.Errorf("%w: pstree.img in %s has %d twice", images.ErrDamaged, im.dir, tid)
		}
		known[tid] = true
		core, err := one[*criucore.CoreEntry](im, fmt.Sprintf("core-%d.img", tid))
		if err != nil {
			return t, err
		}
		if i == 0 {
			t.Dead = core.GetTc().GetTaskState() == taskDead
			limits := core.GetTc().GetRlimits().GetRlimits()
			t.Limits = slices.Clone(limits[:min(len(limits), numLimits)])
		}
		if thread := core.GetThreadCore(); thread != nil {
			t.Threads = append(t.Threads, &criucore.ThreadCoreEntry{
				Creds: thread.Creds, SeccompMode: thread.SeccompMode, SeccompFilter: thread.SeccompFilter,
				SchedPolicy: thread.SchedPolicy, SchedNice: thread.SchedNice,
			})
		} else if !t.Dead {
			return t, fmt.Errorf("%w: core-%d.img in %s has no thread", images.ErrDamaged, tid, im.dir)
		}
		if t.Dead { // CRIU never sets the number of its one thread (pstree.c), and does not read it
			if len(p.GetThreads()) > 1 {
				return t, fmt.Errorf("%w: pstree.img in %s: process %d has ended and has threads", images.ErrDamaged, im.dir, tid)
			}
			break
		}
	}
	if t.Dead {
		return t, nil
	}
	var err error
	t.IDs, err = one[*criucore.TaskKobjIdsEntry](im, fmt.Sprintf("ids-%d.img", t.PID))
	return t, err
}
