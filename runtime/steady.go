// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
	"github.com/gpuckpt/gpuckpt/internal/operation/sequence"
)

// steady makes sure that CRIU can seize each process of a frozen container, also those that are stopped,
// for which CRIU would wait for ever. back takes the error of the dump, and freezes the container again
// where CRIU had thawed it before it failed. A container without processes is left to runc, which
// refuses it.
func (c *container) steady() (back func(dump error) error, err error) {
	cg, err := host.CgroupOf(c.pid)
	if errdefs.IsNotFound(err) {
		return func(dump error) error { return dump }, nil
	}
	if err == nil {
		err = refuseTraced(cg)
	}
	if err == nil {
		err = cg.Loosen()
	}
	if err != nil {
		return nil, err
	}
	return func(dump error) error {
		return sequence.Join(dump, cg.Freeze(), cg.ThawIfKilled(c.pid))
	}, nil
}

// refuseTraced refuses a container with a process that somebody traces: CRIU would take its threads for
// such as have ended, and look for them again until its time is over.
func refuseTraced(cg *host.Cgroup) error {
	pids, err := cg.Pids()
	if err != nil {
		return err
	}
	for _, pid := range pids {
		tids, _ := proc.Threads(pid) // one that is gone has none
		for _, tid := range tids {
			if status, err := proc.ThreadStatus(pid, tid); err == nil && status.Tracer() != 0 {
				return fmt.Errorf("process %s is traced by process %s (a debugger?): end it and try again: %w",
					proc.Describe(pid), proc.Describe(status.TracingProcess()), errdefs.ErrFailedPrecondition)
			}
		}
	}
	return nil
}
