// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/cgroups"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Gate is where a CRIU holds restored processes: criu.Gate.
type Gate interface {
	// CRIU returns the pid of that CRIU.
	CRIU() (int, error)
}

// Held checks the processes that a CRIU holds at the gate: the first one, those below it, and all
// others in CRIU's cgroup, which is the container's. dir is the container's bundle.
func Held(spec *specs.Spec, dir string, first int, gate Gate) error {
	criu, err := gate.CRIU()
	if err != nil {
		return err
	}
	cg, err := host.CgroupOf(criu)
	if err != nil {
		return err
	}
	others, err := cg.Pids()
	if err != nil {
		return err
	}
	pids := below(first)
	for _, pid := range others {
		if pid != criu && !slices.Contains(pids, pid) {
			pids = append(pids, pid)
		}
	}
	own, err := cgroups.ParseCgroupFile(fmt.Sprintf("/proc/%d/cgroup", criu))
	if err != nil {
		return fmt.Errorf("read the cgroups of CRIU: %w", err)
	}
	return check(Container{Spec: spec, PIDs: pids, Cgroups: own, CRIU: criu}, dir)
}

// Frozen checks the processes of a container that are about to be dumped: the first one and those
// below it. They must be frozen. Their cgroups are not compared, since a restore gives them its own.
func Frozen(spec *specs.Spec, dir string, first int) error {
	return check(Container{Spec: spec, PIDs: below(first)}, dir)
}

// below returns a process and those below it.
func below(first int) []int {
	pids := []int{first}
	for i := 0; i < len(pids); i++ {
		for _, child := range proc.Children(pids[i]) {
			if !slices.Contains(pids, child) {
				pids = append(pids, child)
			}
		}
	}
	return pids
}

func check(of Container, dir string) error {
	of.Rootfs = bundle.RootOf(dir, of.Spec)
	if err := Check(of, Kernel()); err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	return nil
}
