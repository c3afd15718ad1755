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
// CRIU dumps its files by gpuckpt's plugin. traces is what would change if it began to use
// CUDA: its mappings of the GPU's files.
type bystander struct {
	pid    int
	traces string
}

// noteBystanders notes the candidates that the driver calls no CUDA processes.
func (s *State) noteBystanders(candidates []int) error {
	s.bystanders = nil
	for _, pid := range candidates {
		if s.isLocked(pid) {
			continue
		}
		holds, err := cuda.HoldsDevice(pid)
		if err != nil {
			return err
		}
		if !holds {
			continue
		}
		traces, err := gpuMappings(pid)
		if proc.Ended(err) {
			continue
		}
		if err != nil {
			return err
		}
		s.bystanders = append(s.bystanders, bystander{pid, traces})
	}
	return nil
}

// gpuMappings returns where a process has files of NVIDIA's devices mapped.
func gpuMappings(pid int) (string, error) {
	mappings, err := proc.Maps(pid)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for _, m := range mappings {
		if strings.HasPrefix(m.Path, "/dev/nvidia") {
			fmt.Fprintf(&b, "%x-%x ", m.Start, m.End)
		}
	}
	return b.String(), nil
}

func (s *State) isLocked(pid int) bool {
	return slices.ContainsFunc(s.procs, func(p cuda.Process) bool { return p.PID.Host == pid })
}

// RefuseUnlocked refuses a process with files of a GPU that the lock did not see: a program
// that began to use CUDA, or a child that was forked, between the lock and the freeze.
func (s *State) RefuseUnlocked() error {
	may, err := s.Candidates()
	if err != nil {
		return err
	}
	for _, pid := range may {
		if s.isLocked(pid) {
			continue
		}
		holds, err := cuda.HoldsDevice(pid)
		if err != nil {
			return err
		}
		if !holds {
			continue
		}
		traces, err := gpuMappings(pid)
		if err != nil {
			return err
		}
		if !slices.Contains(s.bystanders, bystander{pid, traces}) {
			return fmt.Errorf("process %s began to use a GPU while the container was being paused, and is not locked: resume the container and try again: %w",
				proc.Describe(pid), errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}
