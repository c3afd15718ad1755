// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"encoding/binary"
	"slices"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// A container with GPUs and without a seccomp profile gets a filter that answers io_uring_setup
// with ENOSYS and allows all else. A dump with that filter alone is not confined as a profile
// wants it.

// restricts reports whether a profile does more than to answer one call with an error.
func restricts(profile *specs.LinuxSeccomp) bool {
	return profile != nil && (profile.DefaultAction != specs.ActAllow || len(profile.Syscalls) > 1 ||
		len(profile.Syscalls) == 1 && !slices.Equal(profile.Syscalls[0].Names, []string{"io_uring_setup"}))
}

// The instructions of a classic BPF program, linux/bpf_common.h, that libseccomp compiles such a
// filter to.
const (
	loadWord     = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
	jumpEqual    = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
	jumpNotBelow = unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K
	jump         = unix.BPF_JMP | unix.BPF_JA
	answer       = unix.BPF_RET | unix.BPF_K
)

// x32Bit marks the calls of x32 programs (asm/unistd.h, __X32_SYSCALL_BIT).
const x32Bit = 0x40000000

// beyondIOUring reports whether a filter looks at any call but io_uring_setup, which has the same
// number on all architectures.
func beyondIOUring(filter *seccomp.SeccompFilter) bool {
	program := filter.GetFilter()
	for ; len(program) >= 8; program = program[8:] {
		code, k := binary.NativeEndian.Uint16(program), binary.NativeEndian.Uint32(program[4:])
		switch code {
		case jump, answer:
		case loadWord:
			if k > 4 { // beyond the number and the architecture of the call: its arguments
				return true
			}
		case jumpEqual:
			switch k {
			case unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_SETUP | x32Bit, ^uint32(0),
				unix.AUDIT_ARCH_X86_64, unix.AUDIT_ARCH_I386, unix.AUDIT_ARCH_AARCH64, unix.AUDIT_ARCH_ARM:
			default:
				return true
			}
		case jumpNotBelow:
			if k != x32Bit {
				return true
			}
		default:
			return true
		}
	}
	return false
}
