// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package iouring keeps io_uring out of containers that may be checkpointed: CRIU cannot dump it.
// Programs fall back to other calls where the kernel has none, so they are told that it has none.
package iouring

import (
	"fmt"
	goruntime "runtime"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/guard/admission"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

const setup = "io_uring_setup"

// Deny has the spec's seccomp profile answer io_uring_setup with ENOSYS, unless the container
// is to have it or the profile has a rule of its own for it. A container with GPUs and without a
// profile gets one with that rule alone. dump is what a restore is made of, nil for a fresh start. The
// error is that of the annotation.
func Deny(spec *specs.Spec, view config.View, hasGPU bool, dump *criu.Dump) error {
	allowed, err := view.AllowsIOUring()
	if err != nil || allowed || spec.Linux == nil {
		return err
	}
	profile := spec.Linux.Seccomp
	if profile == nil {
		// Processes without a filter cannot be restored into a spec with one.
		if !hasGPU || dump != nil && !admission.Filtered(dump) {
			return nil
		}
		profile = &specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Architectures: allArchitectures()}
	}
	names := func(s specs.LinuxSyscall) bool { return slices.Contains(s.Names, setup) }
	if slices.ContainsFunc(profile.Syscalls, names) {
		return nil
	}
	enosys := uint(unix.ENOSYS)
	profile.Syscalls = append(profile.Syscalls, specs.LinuxSyscall{Names: []string{setup}, Action: specs.ActErrno, ErrnoRet: &enosys})
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

// Refuse refuses a container with a process that has io_uring open or mapped. list returns its
// processes; one that has ended is not refused.
func Refuse(list func() ([]int, error)) error {
	const file = "anon_inode:[io_uring]"
	pids, err := list()
	if err != nil && !proc.Ended(err) {
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
