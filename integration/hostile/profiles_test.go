// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"context"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/seccomp"
	"github.com/containerd/containerd/v2/core/containers"
	coci "github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/criu/image/imagetest"
)

// A filter that runc makes of a profile is at least as strict as that profile, with every condition
// that a profile can have.
func TestProfiles(t *testing.T) {
	deny := func(op specs.LinuxSeccompOperator, name string, index uint, value, second uint64) specs.LinuxSyscall {
		return specs.LinuxSyscall{Names: []string{name}, Action: specs.ActErrno, Args: []specs.LinuxSeccompArg{{Index: index, Value: value, ValueTwo: second, Op: op}}}
	}
	all := []specs.Arch{specs.ArchX86_64, specs.ArchX86, specs.ArchX32}
	for name, profile := range map[string]*specs.LinuxSeccomp{
		"every operator": {DefaultAction: specs.ActAllow, Architectures: all, Syscalls: []specs.LinuxSyscall{
			deny(specs.OpEqualTo, "ptrace", 0, 5, 0), deny(specs.OpNotEqual, "mount", 3, 1<<40, 0), deny(specs.OpLessThan, "swapon", 1, 1<<33+7, 0),
			deny(specs.OpLessEqual, "swapoff", 1, 7, 0), deny(specs.OpGreaterThan, "reboot", 2, 0xfffffffe, 0), deny(specs.OpGreaterEqual, "kexec_load", 0, 1<<35, 0),
			deny(specs.OpMaskedEqual, "unshare", 0, 0x7e020000, 0x10000000), {Names: []string{"setns", "bpf", "connect", "shmget"}, Action: specs.ActKillProcess},
			{Names: []string{"acct"}, Action: specs.ActErrno, Args: []specs.LinuxSeccompArg{{Index: 0, Value: 1, Op: specs.OpGreaterThan}, {Index: 0, Value: 9, Op: specs.OpEqualTo}}},
			{Names: []string{"personality"}, Action: specs.ActErrno, Args: []specs.LinuxSeccompArg{{Index: 0, Value: 1, Op: specs.OpGreaterThan}, {Index: 1, Value: 9, Op: specs.OpEqualTo}}},
		}},
		"native programs alone": {DefaultAction: specs.ActAllow, Syscalls: []specs.LinuxSyscall{{Names: []string{"mount"}, Action: specs.ActErrno}}},
	} {
		t.Run(name, func(t *testing.T) {
			spec := harness.RunSpec{ID: harness.Name(t), Amend: []coci.SpecOpts{func(_ context.Context, _ coci.Client, _ *containers.Container, s *coci.Spec) error {
				s.Linux.Seccomp = profile
				return nil
			}}}
			if err := restoreFrom(t, checking, spec, func(string) {}); err != nil {
				t.Error(err)
			}
		})
	}
}

// A dump whose filter allows more than the profile is refused; without the checks before CRIU it comes
// through, since nobody else can tell.
func TestWeakerFilter(t *testing.T) {
	weaken := func(dir string) {
		f, err := imagetest.Parse(dir, "seccomp.img")
		if err != nil {
			t.Fatal(err)
		}
		for _, filter := range f.Entries[0].Message.(*seccomp.SeccompEntry).GetSeccompFilters() {
			filter.Filter = []byte{6, 0, 0, 0, 0, 0, 0xff, 0x7f} // allows all
		}
		if err := f.Write(dir); err != nil {
			t.Fatal(err)
		}
	}
	harness.Says(t, restoreFrom(t, checking, restricted(t), weaken), "its seccomp filter is weaker than the spec's profile")
	if err := restoreFrom(t, shared, restricted(t), weaken); err != nil {
		t.Error(err)
	}
}
