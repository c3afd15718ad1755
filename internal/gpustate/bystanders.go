// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/proc"
)

// A bystander is a process with files of a GPU and without CUDA state: a child that was
// forked after CUDA began, or a user of NVML alone. The driver does not checkpoint it, and
// CRIU dumps its files by gpuckpt's plugin.
type bystander struct {
	pid int
	// mapped is where the process has files of NVIDIA's devices mapped. It changes when the
	// process begins to use CUDA.
	mapped string
}

// bystandersAmong returns the bystanders among pids.
func (l *locked) bystandersAmong(pids []int) (all []bystander, err error) {
	for _, pid := range pids {
		if slices.ContainsFunc(l.procs, func(p cuda.Process) bool { return p.PID.Host == pid }) {
			continue
		}
		holds, err := cuda.HoldsDevice(pid)
		if err != nil {
			return nil, err
		}
		if !holds {
			continue
		}
		mappings, err := proc.Maps(pid)
		if proc.Ended(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		var mapped strings.Builder
		for _, m := range mappings {
			if strings.HasPrefix(m.Path, "/dev/nvidia") {
				fmt.Fprintf(&mapped, "%x-%x ", m.Start, m.End)
			}
		}
		all = append(all, bystander{pid, mapped.String()})
	}
	return all, nil
}

// refuseUnlocked refuses a process with files of a GPU that the lock did not see: a program
// that began to use CUDA, or a child that was forked, between the lock and the freeze.
func (l *locked) refuseUnlocked(candidates []int) error {
	now, err := l.bystandersAmong(candidates)
	if err != nil {
		return err
	}
	for _, b := range now {
		if !slices.Contains(l.bystanders, b) {
			return fmt.Errorf("process %s began to use a GPU while the container was being paused, and is not locked: resume the container and try again: %w",
				proc.Describe(b.pid), errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}
