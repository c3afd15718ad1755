// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/internal/host"
	"github.com/gpuckpt/gpuckpt/internal/proc"
	"github.com/gpuckpt/gpuckpt/internal/sequence"
)

// steady has the container's processes frozen, so that CRIU can seize each of them, also those that are
// stopped: CRIU would freeze them itself, and then wait for these for ever. back takes the error of the
// dump, and leaves the container frozen if it was so before, else running, whatever became of CRIU. On
// an error of steady it is as it was. A container without processes is left to runc, which refuses it.
func (c *container) steady() (back func(dump error) error, err error) {
	cg, err := host.CgroupOf(c.pid)
	if c.pid == 0 || errdefs.IsNotFound(err) {
		return func(dump error) error { return dump }, nil
	}
	if err != nil {
		return nil, err
	}
	frozen, err := cg.Frozen()
	if err != nil {
		return nil, err
	}
	back = func(dump error) error {
		switch {
		case !frozen:
			err := cg.Thaw()
			if errors.Is(err, fs.ErrNotExist) { // it has ended with its dump
				err = nil
			}
			return sequence.Join(dump, err)
		case dump == nil:
			return nil
		}
		return sequence.Join(dump, cg.Freeze(), cg.ThawIfKilled(c.pid))
	}
	if err := refuseTraced(cg); err != nil {
		return nil, err
	}
	if !frozen {
		_, err = host.RetryFreeze(c.pid, func() (any, error) { return nil, cg.Freeze() })
	}
	if err == nil {
		err = cg.Loosen()
	}
	if err != nil {
		return nil, back(err)
	}
	return back, nil
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
