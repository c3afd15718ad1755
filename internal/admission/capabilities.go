// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/pkg/cap"
)

// capabilitySet returns the spec's names as a set of bits. A name that is not
// known grants nothing.
func capabilitySet(names []string) (set uint64) {
	for _, name := range names {
		if i := slices.Index(cap.Known(), strings.ToUpper(name)); i >= 0 {
			set |= 1 << i
		}
	}
	return set
}

// capabilityWords returns CRIU's words, 32 capabilities each, as a set of bits.
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
	names, unknown := cap.FromBitmap(set)
	for _, number := range unknown {
		names = append(names, fmt.Sprintf("capability %d", number))
	}
	return strings.Join(names, ", ")
}

// rlimitNumber returns the number of a resource limit (asm-generic/resource.h).
func rlimitNumber(name string) (int, bool) {
	i := slices.Index([]string{
		"RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_DATA", "RLIMIT_STACK", "RLIMIT_CORE", "RLIMIT_RSS", "RLIMIT_NPROC", "RLIMIT_NOFILE",
		"RLIMIT_MEMLOCK", "RLIMIT_AS", "RLIMIT_LOCKS", "RLIMIT_SIGPENDING", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_RTPRIO", "RLIMIT_RTTIME",
	}, name)
	return i, i >= 0
}
