// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// Without the CUDA steps, that is with runc's own shim, CRIU meets the GPU's
// open device files and fails; with them the same container is checkpointed.
func TestWithoutCUDASteps(t *testing.T) {
	results.Add(t)
	t.Run("off", func(t *testing.T) {
		k := shared.Work(t, harness.RunSpec{
			Runtime: harness.RuncRuntime, GPUs: []int{0},
			Annotations: map[string]string{"org.criu.config": shared.CRIUConfigPath()},
		}, "counter")
		k.Expect(t, "count", "101")
		harness.Says(t, k.Checkpoint(t.Context(), "refused:1"), "criu failed")
		log, err := os.ReadFile(filepath.Join(shared.Bundle(k.ID), "criu-dump.log"))
		if err != nil {
			t.Fatal(err)
		}
		why := errorLines(string(log))
		t.Logf("CRIU, without the CUDA steps: %s", why)
		// An open device, or on a real GPU one that is mapped.
		if !slices.ContainsFunc([]string{"(chr ", "/dev/nvidia", "handle_device_vma"}, func(word string) bool { return strings.Contains(why, word) }) {
			t.Errorf("CRIU did not fail because of a device file: %s", why)
		}
		isPaused(t, k, false)
		k.Expect(t, "count", "102")
	})
	t.Run("on", func(t *testing.T) {
		k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "counter")
		k.Expect(t, "count", "101")
		ref := takeCheckpoint(t, shared, k, "1")
		t.Log("with the CUDA steps: a checkpoint")
		k.Expect(t, "count", "102")
		k.MustRemove(t)
		r := restore(t, shared, k.ID, ref, k.Port)
		r.Expect(t, "count", "102")
	})
}

// errorLines are those of CRIU's log that tell of errors.
func errorLines(log string) string {
	var lines []string
	for line := range strings.Lines(log) {
		if strings.Contains(line, "Error (") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return strings.Join(lines, "\n")
}
