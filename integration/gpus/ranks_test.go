// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpus

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// envRanks is how often TestRanksAreLocked locks.
const envRanks = "GPUCKPT_TEST_RANKS"

// startRanks runs two processes whose kernels wait for each other, all the time, on a GPU each. The second
// one computes for 2 ms before each of its steps.
func startRanks(t *testing.T) *harness.Container {
	t.Helper()
	shared.Configured(t, fmt.Sprintf("cdi_spec_dirs = [%q]\nlock_timeout = \"1m\"\n", cdiDir())) // for slow machines
	k := start(t, harness.RunSpec{GPUs: []int{0, 1}, Ports: 2}, "ranks", "--procs", "2", "--gpus", "2", "--work", "2000")
	goOn(t, k)
	return k
}

// goOn waits until each rank has taken a step more, and fails the test if one was wrong.
func goOn(t *testing.T, k *harness.Container) {
	t.Helper()
	for n := range 2 {
		before := stepsOf(t, k.Process(n))
		within(t, fmt.Sprintf("a step of rank %d", n), func() bool { return stepsOf(t, k.Process(n)) > before })
	}
}

// within waits until something is so. On a machine that is busy a restored rank's first step takes long.
func within(t *testing.T, what string, so func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !so(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within two minutes\n%s", what, shared.LogTail(4000))
		}
	}
}

func stepsOf(t *testing.T, k *harness.Container) (steps int) {
	t.Helper()
	var bad int
	reply := k.Answer(t, "steps")
	if _, err := fmt.Sscanf(reply, "steps=%d bad=%d", &steps, &bad); err != nil || bad != 0 {
		t.Fatalf("a rank answers %q", reply)
	}
	return steps
}

// Two ranks that take steps without a pause are checkpointed, killed and restored, with the GPUs
// swapped, and once more with the GPUs swapped back. No step is lost or taken twice.
func TestRanks(t *testing.T) {
	result := two(t)
	k := startRanks(t)
	at := [2]int{0, 1}
	for range 2 {
		before := stepsOf(t, k)
		dir := checkpointed(t, result, k)
		at[0], at[1] = at[1], at[0]
		spec := harness.RunSpec{GPUs: []int{0, 1}, Ports: 2, Annotations: given(uuid(0)+"="+uuid(1), uuid(1)+"="+uuid(0))}
		k = restored(t, result, spec, dir, k.Port)
		goOn(t, k)
		if now := stepsOf(t, k); now <= before {
			t.Errorf("restored, rank 0 is at step %d; the checkpoint was taken after step %d", now, before)
		}
		for n := range 2 {
			isOn(t, k, n, uuid(at[n]))
		}
	}
}

// The lock of such ranks comes about in every try. GPUCKPT_TEST_RANKS is how many.
func TestRanksAreLocked(t *testing.T) {
	result := two(t)
	tries := 3
	if text := os.Getenv(envRanks); text != "" {
		var err error
		if tries, err = strconv.Atoi(text); err != nil {
			t.Fatalf("%s: %v", envRanks, err)
		}
	}
	k := startRanks(t)
	count := func(words string) int { return strings.Count(linesOf(shared.Log(), "id="+k.ID+" "), words) }
	before := count("phase=lock") // of another container of this name
	var longest, all time.Duration
	for try := range tries {
		began := time.Now()
		if out, err := shared.Ctr(t.Context(), "tasks", "pause", k.ID); err != nil {
			t.Fatal(out, err)
		}
		took := time.Since(began)
		longest, all = max(longest, took), all+took
		within(t, "the lock in the log", func() bool { return count("phase=lock")+count("without the CUDA lock") == before+try+1 })
		if got := count("phase=lock"); got != before+try+1 {
			t.Fatalf("%d of %d locks came about:\n%s", got-before, try+1, shared.LogTail(4000))
		}
		if out, err := shared.Ctr(t.Context(), "tasks", "resume", k.ID); err != nil {
			t.Fatal(out, err)
		}
		goOn(t, k)
	}
	t.Logf("%d locks, the longest in %v, on average in %v with ctr's pause", tries, longest, all/time.Duration(tries))
	result.Number("locks_count", float64(tries))
	result.Number("longest_lock_seconds", longest.Seconds())
	result.Number("mean_lock_seconds", (all / time.Duration(tries)).Seconds())
}

// linesOf returns the lines of a log that have a word.
func linesOf(log, word string) string {
	var b strings.Builder
	for line := range strings.Lines(log) {
		if strings.Contains(line, word) {
			b.WriteString(line)
		}
	}
	return b.String()
}
