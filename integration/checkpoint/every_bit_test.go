// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// Every bit of GPU memory comes back, in the process that ran on as well as in
// the restored one, and after part of it was changed in between.
func TestPattern(t *testing.T) {
	for _, size := range session.Sizes(t) {
		t.Run(size.Name, func(t *testing.T) {
			result := results.Add(t)
			result.Number("gpu_memory_bytes", float64(size.Bytes))
			k := shared.Work(t, harness.RunSpec{GPUs: []int{0}},
				"pattern", "--bytes", size.Arg(), "--chunks", "3", "--seed", "7")
			k.Expect(t, "verify", "bad=0")

			var first string
			if err := result.Time("checkpoint", func() error { first = takeCheckpoint(t, shared, k, "1"); return nil }); err != nil {
				t.Fatal(err)
			}
			result.Phases(t, k)
			k.Expect(t, "verify", "bad=0") // it was left running
			k.Expect(t, "write 250", "wrote 250")
			second := takeCheckpoint(t, shared, k, "2")
			k.MustRemove(t)

			if m := metadataOf(t, shared, first); m.Processes[0].Bytes < size.Bytes {
				t.Errorf("the metadata tells of %d bytes of GPU state, the program has %d", m.Processes[0].Bytes, size.Bytes)
			}
			for _, ref := range []string{second, first} {
				var r *harness.Container
				if err := result.Time("restore", func() error { r = restore(t, shared, k.ID, ref, k.Port); return nil }); err != nil {
					t.Fatal(err)
				}
				result.Phases(t, r)
				r.Expect(t, "verify", "bad=0")
				r.Expect(t, "write 900", "wrote 900") // and it can be written to
				r.Expect(t, "verify", "bad=0")
				r.MustRemove(t)
			}
		})
	}
}
