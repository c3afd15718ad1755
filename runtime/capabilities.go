// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"fmt"
	"slices"
	"strings"
)

// capabilities by their numbers (linux/capability.h).
func capabilities() []string {
	return []string{
		"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID",
		"CAP_SETPCAP", "CAP_LINUX_IMMUTABLE", "CAP_NET_BIND_SERVICE", "CAP_NET_BROADCAST", "CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_IPC_LOCK",
		"CAP_IPC_OWNER", "CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_SYS_CHROOT", "CAP_SYS_PTRACE", "CAP_SYS_PACCT", "CAP_SYS_ADMIN",
		"CAP_SYS_BOOT", "CAP_SYS_NICE", "CAP_SYS_RESOURCE", "CAP_SYS_TIME", "CAP_SYS_TTY_CONFIG", "CAP_MKNOD", "CAP_LEASE",
		"CAP_AUDIT_WRITE", "CAP_AUDIT_CONTROL", "CAP_SETFCAP", "CAP_MAC_OVERRIDE", "CAP_MAC_ADMIN", "CAP_SYSLOG", "CAP_WAKE_ALARM",
		"CAP_BLOCK_SUSPEND", "CAP_AUDIT_READ", "CAP_PERFMON", "CAP_BPF", "CAP_CHECKPOINT_RESTORE",
	}
}

// capabilitySet gives the spec's names as a set of bits. Names that are not
// known grant nothing.
func capabilitySet(names []string) (set uint64) {
	all := capabilities()
	for _, name := range names {
		if i := slices.Index(all, strings.ToUpper(name)); i >= 0 {
			set |= 1 << i
		}
	}
	return set
}

// capabilityWords gives CRIU's words, 32 capabilities each, as a set of bits.
func capabilityWords(words []uint32) (set uint64, err error) {
	if len(words) > 2 {
		return 0, fmt.Errorf("%d words, more than two", len(words))
	}
	for i, w := range words {
		set |= uint64(w) << (32 * i)
	}
	return set, nil
}

// capabilityNames names the bits of a set.
func capabilityNames(set uint64) string {
	var names []string
	all := capabilities()
	for i := range 64 {
		switch {
		case set&(1<<i) == 0:
		case i < len(all):
			names = append(names, all[i])
		default:
			names = append(names, fmt.Sprintf("capability %d", i))
		}
	}
	return strings.Join(names, ", ")
}

// rlimitNumber gives the number of one of resource limits (asm-generic/resource.h).
func rlimitNumber(name string) (int, bool) {
	i := slices.Index([]string{
		"RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_DATA", "RLIMIT_STACK", "RLIMIT_CORE", "RLIMIT_RSS", "RLIMIT_NPROC", "RLIMIT_NOFILE",
		"RLIMIT_MEMLOCK", "RLIMIT_AS", "RLIMIT_LOCKS", "RLIMIT_SIGPENDING", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_RTPRIO", "RLIMIT_RTTIME",
	}, name)
	return i, i >= 0
}
