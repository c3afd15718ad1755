// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"fmt"
	"os"
	"slices"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/internal/bundle"
	"github.com/gpuckpt/gpuckpt/internal/host"
	"github.com/gpuckpt/gpuckpt/internal/proc"
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
	pids := []int{first}
	for i := 0; i < len(pids); i++ {
		for _, child := range proc.Children(pids[i]) {
			if !slices.Contains(pids, child) {
				pids = append(pids, child)
			}
		}
	}
	for _, pid := range others {
		if pid != criu && !slices.Contains(pids, pid) {
			pids = append(pids, pid)
		}
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", criu))
	if err != nil {
		return fmt.Errorf("read the cgroups of CRIU: %w", err)
	}
	err = Check(Restored{Spec: spec, Rootfs: bundle.RootOf(dir, spec), PIDs: pids, Cgroups: parseCgroups(string(text)), CRIU: criu}, Kernel())
	if err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	return nil
}
