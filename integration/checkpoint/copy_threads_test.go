// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// copies are what the shims' log says of copies for the driver, from a place in it on.
func copies(t *testing.T, from int) (threads []int) {
	t.Helper()
	const says = " bytes were copied for the driver, by "
	for line := range strings.Lines(shared.Log()[from:]) {
		before, after, ok := strings.Cut(line, says)
		if !ok {
			continue
		}
		var n, bytes int
		if _, err := fmt.Sscan(after, &n); err != nil {
			t.Fatalf("the log says %q", line)
		}
		if _, err := fmt.Sscan(before[strings.LastIndex(before, " ")+1:], &bytes); err != nil || bytes < 24<<20 {
			t.Errorf("the log says %q, want at least 24 MiB", line)
		}
		threads = append(threads, n)
	}
	return threads
}

// The driver's copies are helped in a checkpoint, where the container goes on, and
// in a restore; not where the node says so. What is in the GPU is the same.
func TestCopiers(t *testing.T) {
	for _, test := range []struct {
		name, debug         string
		threads, operations int
	}{
		{"default", "", min(8, runtime.NumCPU()), 3},
		{"off", "[debug]\ncopy_threads = 0\n", 0, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			results.Add(t)
			if test.threads == 1 {
				t.Skip("one processor: there is nobody to help")
			}
			shared.Configured(t, test.debug)
			k := shared.Work(t, harness.RunSpec{GPUs: []int{0}}, "pattern", "--bytes", "24M")
			k.Expect(t, "verify", "bad=0")
			from := len(shared.Log())
			dir := t.TempDir()
			checkpointInto(t, shared, k, dir)
			k.Expect(t, "verify", "bad=0")
			endTask(t, shared, k)
			if err := restoreTask(t, shared, k, dir); err != nil {
				t.Fatalf("%v\n%s", err, shared.LogTail(3000))
			}
			k.Expect(t, "verify", "bad=0")
			got := copies(t, from)
			if len(got) != test.operations {
				t.Errorf("the driver was helped %d times, want %d\n%s", len(got), test.operations, shared.LogTail(3000))
			}
			for _, n := range got {
				if n != test.threads {
					t.Errorf("%d threads copied, want %d", n, test.threads)
				}
			}
		})
	}
}
