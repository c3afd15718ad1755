// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"slices"
	"time"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

const (
	// forkPatience bounds the wait for children of vfork to execute a program or to end. They take
	// milliseconds as a rule.
	forkPatience = 3 * time.Second
	// forkLook is the time between two looks for them.
	forkLook = 500 * time.Microsecond
)

// freezeOutsideForks has a frozen cgroup run on and freezes it again, until no process in it is a child
// of vfork that still shares its parent's memory. The thread that called vfork waits for the child in
// the kernel, where nobody can stop it, CRIU neither. It gives up after patience, and leaves the cgroup
// frozen. After an error it may run.
//
// A child of fork has a copy of the memory from its first moment on, and can be frozen anywhere.
func (c *Cgroup) freezeOutsideForks(patience time.Duration) error {
	for began := time.Now(); ; {
		if !c.inFork() || time.Since(began) > patience {
			return nil
		}
		if err := c.Thaw(); err != nil {
			return err
		}
		for c.inFork() && time.Since(began) <= patience {
			time.Sleep(forkLook)
		}
		if err := c.Freeze(); err != nil {
			return err
		}
	}
}

// inFork reports whether a process of the cgroup shares the memory of its parent.
func (c *Cgroup) inFork() bool {
	pids, err := c.Pids()
	return err == nil && slices.ContainsFunc(pids, func(pid int) bool {
		status, err := proc.StatusOf(pid)
		return err == nil && proc.SharesMemory(pid, status.Parent())
	})
}
