// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/pkg/cap"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// Capabilities returns capabilities by a spec's names, as a set of bits. A name that is not known grants nothing.
func Capabilities(names []string) (set uint64) {
	for _, name := range names {
		if i := slices.Index(cap.Known(), strings.ToUpper(name)); i >= 0 {
			set |= 1 << i
		}
	}
	return set
}

// CapabilityNames names the bits of a set.
func CapabilityNames(set uint64) string {
	names, unknown := cap.FromBitmap(set)
	for _, number := range unknown {
		names = append(names, fmt.Sprintf("capability %d", number))
	}
	return strings.Join(names, ", ")
}

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
