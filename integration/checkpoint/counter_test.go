// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// The program of NVIDIA's blog: a counter in device memory, counted up by UDP
// packets, goes on across checkpoint, kill and restore.
func TestCounter(t *testing.T) {
	result := results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
	k.Expect(t, "count", "101")
	if err := result.Time("checkpoint", func() error { return k.Checkpoint(t.Context(), "counter:1") }); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(4000))
	}
	removeImageAtEnd(t, shared, "counter:1")
	result.Phases(t, k)
	k.Expect(t, "count", "102") // it was left running
	k.MustRemove(t)
	var r *harness.Container
	if err := result.Time("restore", func() (err error) {
		r, err = shared.Restore(t.Context(), k.ID, "counter:1", k.Port)
		return err
	}); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(4000))
	}
	r.RemoveAtEnd(t)
	result.Phases(t, r)
	r.Expect(t, "count", "102") // as at the checkpoint
	r.Expect(t, "count", "103")
}
