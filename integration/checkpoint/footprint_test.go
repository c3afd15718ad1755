// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// footprintRounds is how often each shim is started, in turns.
const footprintRounds = 10

// maxMemoryRatio is how much more memory than runc's shim this one may take. It was 1.25 before the shim
// read all of CRIU's images and checked signatures, whose code and tables take 1 MiB.
const maxMemoryRatio = 1.35

// What this shim costs a container that is never checkpointed, beside runc's
// own in the same run: memory of the idle shim, and the time of "ctr run". The
// memory has a limit; the time is only noted, since it depends on what else the
// machine does.
func TestFootprint(t *testing.T) {
	result := results.Add(t)
	shims := []string{harness.Runtime, harness.RuncRuntime}
	rss, pss, took := map[string][]float64{}, map[string][]float64{}, map[string][]float64{}
	for round := range footprintRounds {
		// In turns, so that what the machine does meanwhile hits both.
		for i := range shims {
			shim := shims[(i+round)%2]
			memory, seconds := idleShim(t, shim)
			rss[shim] = append(rss[shim], float64(memory.RSS))
			pss[shim] = append(pss[shim], float64(memory.PSS))
			took[shim] = append(took[shim], seconds)
		}
	}
	var table strings.Builder
	for _, row := range []struct {
		name, unit string
		values     map[string][]float64
		scale      float64
	}{
		{"memory (RSS)", "MiB", rss, 1 << 20}, {"memory (PSS)", "MiB", pss, 1 << 20}, {"ctr run", "ms", took, 1e-3},
	} {
		ours, theirs := median(row.values[harness.Runtime]), median(row.values[harness.RuncRuntime])
		fmt.Fprintf(&table, "%-13s this shim %6.1f %-3s   runc's %6.1f %-3s   ratio %.3f\n",
			row.name, ours/row.scale, row.unit, theirs/row.scale, row.unit, ours/theirs)
	}
	t.Logf("medians of %d starts each:\n%s", footprintRounds, table.String())
	for name, shim := range map[string]string{"gpuckpt": harness.Runtime, "runc": harness.RuncRuntime} {
		result.Number(name+"_shim_rss_bytes", median(rss[shim]))
		result.Number(name+"_shim_pss_bytes", median(pss[shim]))
		result.Number(name+"_ctr_run_seconds", median(took[shim]))
	}
	if ratio := median(rss[harness.Runtime]) / median(rss[harness.RuncRuntime]); ratio > maxMemoryRatio {
		t.Errorf("this shim takes %.2f times the memory of runc's, %v at most", ratio, maxMemoryRatio)
	}
}

// idleShim runs a container that sleeps, and gives its shim's memory and how
// long "ctr run" took, in seconds.
func idleShim(t *testing.T, runtime string) (harness.Memory, float64) {
	t.Helper()
	k := &harness.Container{ID: harness.Name(t)}
	start := time.Now()
	ctr(t, shared, "run", "--detach", "--null-io", "--net-host", "--snapshotter", shared.Snapshotter(),
		"--runtime", runtime, harness.WorkloadImage, k.ID, "gpuwork", "sleep")
	seconds := time.Since(start).Seconds()
	memory, err := harness.ProcessMemory(shimOfID(t, shared, k.ID))
	if err != nil {
		t.Fatal(err)
	}
	if err := shared.Remove(t.Context(), k.ID); err != nil {
		t.Fatal(err)
	}
	return memory, seconds
}

// median is the middle one, or the mean of the middle two.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}
