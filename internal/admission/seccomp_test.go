// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"encoding/binary"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// comparing is a filter that compares the number of the call with some numbers.
func comparing(numbers ...uint32) (program []byte) {
	add := func(code uint16, k uint32) {
		program = binary.NativeEndian.AppendUint16(program, code)
		program = append(program, 0, 0)
		program = binary.NativeEndian.AppendUint32(program, k)
	}
	add(loadWord, 4)
	add(jumpEqual, unix.AUDIT_ARCH_X86_64)
	add(loadWord, 0)
	add(jumpNotBelow, x32Bit)
	for _, n := range numbers {
		add(jumpEqual, n)
	}
	add(answer, 0x7fff0000)
	return program
}

func TestBeyondIOUring(t *testing.T) {
	for name, test := range map[string]struct {
		program []byte
		want    bool
	}{
		"io_uring alone":      {comparing(unix.SYS_IO_URING_SETUP), false},
		"of x32 too":          {comparing(unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_SETUP|x32Bit), false},
		"another call":        {comparing(unix.SYS_IO_URING_SETUP, unix.SYS_PTRACE), true},
		"a call's argument":   {append(comparing(), 0x20, 0, 0, 0, 16, 0, 0, 0), true},
		"allows all, tests 0": {comparing(0), true},
	} {
		if got := beyondIOUring(&seccomp.SeccompFilter{Filter: test.program}); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

func TestRestricts(t *testing.T) {
	rule := specs.LinuxSyscall{Names: []string{"io_uring_setup"}, Action: specs.ActErrno}
	for name, test := range map[string]struct {
		profile *specs.LinuxSeccomp
		want    bool
	}{
		"none":           {nil, false},
		"ours":           {&specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Syscalls: []specs.LinuxSyscall{rule}}, false},
		"denies all":     {&specs.LinuxSeccomp{DefaultAction: specs.ActErrno, Syscalls: []specs.LinuxSyscall{rule}}, true},
		"denies another": {&specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Syscalls: []specs.LinuxSyscall{rule, {Names: []string{"ptrace"}}}}, true},
	} {
		if got := restricts(test.profile); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}
