// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A container with a GPU has no io_uring and no MPTCP, which CRIU cannot dump, and is checkpointed and restored.
func TestNoIOUring(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "ring")
	k.Expect(t, "ring", "ENOSYS")
	k.Expect(t, "mptcp", "EPROTONOSUPPORT")
	k.Expect(t, "count", "101")
	ref := takeCheckpoint(t, shared, k, "1")
	k.MustRemove(t)
	r := restore(t, shared, k.ID, ref, k.Port)
	r.Expect(t, "ring", "ENOSYS")
	r.Expect(t, "count", "102")
	takeCheckpoint(t, shared, r, "2")
}

// The same with a seccomp profile of its own.
func TestNoIOUringInProfile(t *testing.T) {
	results.Add(t)
	k := shared.Work(t, harness.RunSpec{GPUs: []int{0}, CtrFlags: []string{"--seccomp"}}, "ring")
	k.Expect(t, "ring", "ENOSYS")
	k.Expect(t, "mptcp", "EPROTONOSUPPORT")
	k.Expect(t, "count", "101")
	ref := takeCheckpoint(t, shared, k, "1")
	k.MustRemove(t)
	restore(t, shared, k.ID, ref, k.Port).Expect(t, "count", "102")
}

// A container that has io_uring on request is refused by name while a process uses it, and runs on.
// One whose processes do not use it is restored, though they have no filter.
func TestIOUringAllowed(t *testing.T) {
	results.Add(t)
	allowed := harness.RunSpec{GPUs: []int{0}, Annotations: map[string]string{"dev.gpuckpt.io-uring": "allow"}}
	k := shared.Work(t, allowed, "ring")
	if answer := k.Answer(t, "ring"); answer == "ENOSYS" || answer == "EPERM" {
		t.Skipf("this kernel has no io_uring: %s", answer)
	}
	k.Expect(t, "count", "101")
	for range 2 {
		harness.Says(t, k.Checkpoint(t.Context(), "refused:1"), "preflight", "(gpuwork) uses io_uring", "dev.gpuckpt.io-uring=allow")
	}
	isPaused(t, k, false)
	k.Expect(t, "ring", "open")
	k.Expect(t, "count", "102")
	k.MustRemove(t)

	k = shared.Work(t, allowed, "counter")
	k.Expect(t, "count", "101")
	ref := takeCheckpoint(t, shared, k, "1")
	k.MustRemove(t)
	restore(t, shared, k.ID, ref, k.Port).Expect(t, "count", "102") // without the annotation
}
