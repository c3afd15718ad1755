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
	k := start(t, shared, harness.RunSpec{GPUs: []int{0}}, "counter")
	expect(t, k, "count", "101")
	if err := result.Time("checkpoint", func() error { return k.Checkpoint(t.Context(), "counter:1") }); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(4000))
	}
	removeImageAtEnd(t, shared, "counter:1")
	notePhases(t, result, shared, k.ID)
	expect(t, k, "count", "102") // it was left running
	kill(t, k)
	var r *harness.Container
	if err := result.Time("restore", func() (err error) {
		r, err = shared.Restore(t.Context(), k.ID, "counter:1", k.Port)
		return err
	}); err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(4000))
	}
	removeAtEnd(t, r)
	notePhases(t, result, shared, r.ID)
	expect(t, r, "count", "102") // as at the checkpoint
	expect(t, r, "count", "103")
}
