// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"os"
	"strconv"
	"strings"
)

// EnvSizes lists amounts of GPU memory to test with, "1GiB,100GiB".
const EnvSizes = "GPUCKPT_TEST_SIZES"

// Size is an amount of GPU memory.
type Size struct {
	Name  string // "48MiB"
	Bytes uint64
}

// Arg is the size as gpuwork takes it.
func (s Size) Arg() string { return strconv.FormatUint(s.Bytes, 10) }

// Sizes are those of GPUCKPT_TEST_SIZES, or one that suits the kind of GPU.
func (s *Session) Sizes(t T) []Size {
	t.Helper()
	list := os.Getenv(EnvSizes)
	if list == "" {
		if list = "48MiB"; s.GPU.Kind == RealGPU {
			list = "1GiB"
		}
	}
	var sizes []Size
	for name := range strings.SplitSeq(list, ",") {
		digits, shift := strings.TrimSuffix(name, "MiB"), 20
		if digits == name {
			digits, shift = strings.TrimSuffix(name, "GiB"), 30
		}
		n, err := strconv.ParseUint(digits, 10, 32)
		if digits == name || err != nil {
			t.Fatalf("%s: %q is no size such as 1GiB or 48MiB", EnvSizes, name)
		}
		sizes = append(sizes, Size{name, n << shift})
	}
	return sizes
}
