// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package workloads

import (
	"fmt"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A counter in a PyTorch tensor goes on across checkpoint, kill and restore.
func TestCounter(t *testing.T) {
	result := results.Add(t)
	needsPyTorch(t)
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	k := start(t, true, harness.RunSpec{ID: harness.Name(t), Port: port}, "counter.py", "--port", fmt.Sprint(port))
	within(t, k, "PyTorch starts", func() bool { return strings.Contains(k.Logs(), "ready") })
	expectCount(t, k, "101")
	ref := checkpoint(t, result, k)
	expectCount(t, k, "102") // it was left running
	k.MustRemove(t)
	r := restore(t, result, k, ref)
	expectCount(t, r, "102") // as at the checkpoint
	expectCount(t, r, "103")
	wantGPUState(t, result)
}

func expectCount(t *testing.T, k *harness.Container, want string) {
	t.Helper()
	got, err := k.Ask(t.Context(), "count")
	if err != nil {
		t.Fatalf("%v; it wrote:\n%s", err, tail(k.Logs()))
	}
	if got != want {
		t.Fatalf("it counts %q, want %q", got, want)
	}
}
