// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"os"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// mostMemory returns how much more memory a process had at its peak, in bytes, while do ran.
func mostMemory(t *testing.T, pid int, do func()) uint64 {
	t.Helper()
	before := resident(t, pid)
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0); err != nil { // forgets the peak: proc_pid_clear_refs(5)
		t.Fatal(err)
	}
	do()
	status, err := proc.StatusOf(pid)
	if err != nil {
		t.Fatal(err)
	}
	peak := status.Bytes("VmHWM")
	t.Logf("the shim had %d MiB, and %d at its peak", before>>20, peak>>20)
	return peak - min(peak, before)
}

// A hook that writes without end costs neither the shim nor the node memory, and its error has the end.
func TestHookWritesMuch(t *testing.T) {
	results.Add(t)
	k := hooked(t, map[string]string{beforeCheckpoint: "gpuwork print 192"})
	more := mostMemory(t, shimOf(t, k), func() {
		harness.Says(t, checkpointTask(t, shared, k, t.TempDir()), "hook before-checkpoint", "status 3", `and the end of it`)
	})
	if more > 64<<20 {
		t.Errorf("192 MiB of a hook's output took %d MiB of the shim", more>>20)
	}
	k.Expect(t, "count", "102")
}
