// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// sizes are the amounts of GPU memory that the pattern is verified for:
// GPUCKPT_TEST_SIZES ("1GiB,8GiB"), or one size that suits the kind of GPU.
func sizes(t *testing.T) []string {
	t.Helper()
	if list := os.Getenv("GPUCKPT_TEST_SIZES"); list != "" {
		return strings.Split(list, ",")
	}
	if gpu.Kind == harness.RealGPU {
		return []string{"1GiB"}
	}
	return []string{"48MiB"}
}

// bytesOf reads "1GiB" or "48MiB".
func bytesOf(t *testing.T, size string) uint64 {
	t.Helper()
	for unit, shift := range map[string]int{"GiB": 30, "MiB": 20} {
		if digits, ok := strings.CutSuffix(size, unit); ok {
			n, err := strconv.ParseUint(digits, 10, 32)
			if err != nil {
				break
			}
			return n << shift
		}
	}
	t.Fatalf("GPUCKPT_TEST_SIZES: %q is no size such as 1GiB or 48MiB", size)
	return 0
}

// Every bit of GPU memory comes back, in the process that ran on as well as in
// the restored one, and after part of it was changed in between.
func TestPattern(t *testing.T) {
	for _, size := range sizes(t) {
		t.Run(size, func(t *testing.T) {
			result := results.Add(t)
			bytes := bytesOf(t, size)
			result.Number("gpu_memory_bytes", float64(bytes))
			k := start(t, shared, harness.RunSpec{GPUs: []int{0}},
				"pattern", "--bytes", strconv.FormatUint(bytes, 10), "--chunks", "3", "--seed", "7")
			expect(t, k, "verify", "bad=0")

			var first string
			if err := result.Time("checkpoint", func() error { first = takeCheckpoint(t, shared, k, "1"); return nil }); err != nil {
				t.Fatal(err)
			}
			notePhases(t, result, shared, k.ID)
			expect(t, k, "verify", "bad=0") // it was left running
			expect(t, k, "write 250", "wrote 250")
			second := takeCheckpoint(t, shared, k, "2")
			kill(t, k)

			if m := metadataOf(t, shared, first); m.Processes[0].Bytes < bytes {
				t.Errorf("the metadata tells of %d bytes of GPU state, the program has %d", m.Processes[0].Bytes, bytes)
			}
			for _, ref := range []string{second, first} {
				var r *harness.Container
				if err := result.Time("restore", func() error { r = restore(t, shared, k.ID, ref, k.Port); return nil }); err != nil {
					t.Fatal(err)
				}
				notePhases(t, result, shared, r.ID)
				expect(t, r, "verify", "bad=0")
				expect(t, r, "write 900", "wrote 900") // and it can be written to
				expect(t, r, "verify", "bad=0")
				kill(t, r)
			}
		})
	}
}
