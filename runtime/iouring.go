// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"fmt"
	goruntime "runtime"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/internal/admission"
	"github.com/gpuckpt/gpuckpt/internal/config"
	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/proc"
)

// CRIU cannot dump io_uring. Programs fall back to other calls where the kernel has none, so a
// container that may be checkpointed is told that it has none.

const ioUringSetup = "io_uring_setup"

// denyIOUring has the spec's seccomp profile answer io_uring_setup with ENOSYS, unless the container
// is to have it or the profile has a rule of its own for it. A container with GPUs and without a
// profile gets one with that rule alone. dump is what a restore is made of, nil for a fresh start.
func denyIOUring(c *container, spec *specs.Spec, dump *criu.Dump) error {
	allowed, err := config.View{Annotations: c.annotations}.AllowsIOUring()
	if err != nil || allowed || spec.Linux == nil {
		return err
	}
	profile := spec.Linux.Seccomp
	if profile == nil {
		// Processes without a filter cannot be restored into a spec with one.
		if len(c.request.Sources) == 0 || dump != nil && !admission.Filtered(dump) {
			return nil
		}
		profile = &specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Architectures: allArchitectures()}
	}
	names := func(s specs.LinuxSyscall) bool { return slices.Contains(s.Names, ioUringSetup) }
	if slices.ContainsFunc(profile.Syscalls, names) {
		return nil
	}
	enosys := uint(unix.ENOSYS)
	profile.Syscalls = append(profile.Syscalls, specs.LinuxSyscall{Names: []string{ioUringSetup}, Action: specs.ActErrno, ErrnoRet: &enosys})
	spec.Linux.Seccomp = profile
	return nil
}

// allArchitectures returns those whose programs this machine runs: libseccomp kills a process that
// makes a call of an architecture that its filter does not name.
func allArchitectures() []specs.Arch {
	switch goruntime.GOARCH {
	case "amd64":
		return []specs.Arch{specs.ArchX86_64, specs.ArchX86, specs.ArchX32}
	case "arm64":
		return []specs.Arch{specs.ArchAARCH64, specs.ArchARM}
	}
	return nil
}

// refuseIOUring refuses a container with a process that has io_uring open or mapped.
func refuseIOUring(c *container) error {
	const file = "anon_inode:[io_uring]"
	pids, err := c.pids()
	if proc.Ended(err) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, pid := range pids {
		uses, err := proc.HasOpen(pid, file)
		if err == nil && !uses {
			uses, err = proc.HasMapped(pid, file)
		}
		if err != nil && !proc.Ended(err) {
			return err
		}
		if uses {
			return fmt.Errorf("process %s uses io_uring, which CRIU cannot dump: remove the container's annotation %s=allow, or have the program do without: %w",
				proc.Describe(pid), annotations.IOUring, errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}
