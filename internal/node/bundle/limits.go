// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// MayRun reports whether the limits of a spec grant a scheduling policy and a priority without CAP_SYS_NICE
// (user_check_sched_setscheduler in the kernel).
func MayRun(spec *specs.Spec, policy, priority uint32) bool {
	switch policy {
	case unix.SCHED_DEADLINE:
		return false
	case unix.SCHED_FIFO, unix.SCHED_RR:
		return uint64(max(priority, 1)) <= hardLimit(spec, "RLIMIT_RTPRIO")
	}
	return true
}

// MayBeNice reports whether the limits of a spec grant a nice value without CAP_SYS_NICE (can_nice).
func MayBeNice(spec *specs.Spec, nice int32) bool {
	return nice >= 0 || uint64(20-int64(nice)) <= hardLimit(spec, "RLIMIT_NICE")
}

// hardLimit is the highest limit that a process may have, as a rule 0 where the spec has none.
func hardLimit(spec *specs.Spec, name string) uint64 {
	for _, limit := range spec.Process.Rlimits {
		if limit.Type == name {
			return limit.Hard
		}
	}
	return 0
}
