// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package workloads

import (
	"context"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/workloads/programs"
)

// envRanks is how often TestLockOverNCCL locks, as in integration/gpus, and TestRefusedOverNVLink is refused.
const envRanks = "GPUCKPT_TEST_RANKS"

func triesWanted(t *testing.T, usual int) int { return wanted(t, envRanks, usual) }

// wanted is the number in an environment variable, or the usual one.
func wanted(t *testing.T, variable string, usual int) int {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return usual
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("%s: %q is no number of that kind", variable, text)
	}
	return n
}

// Ranks of a training over NCCL are locked in every try, while they take steps without a pause, and go
// on. GPUCKPT_TEST_RANKS is how many tries. With GPUCKPT_TEST_INTERPOSER none leaves the memory to the driver.
func TestLockOverNCCL(t *testing.T) {
	for _, name := range []string{"nccl-shm", "nccl-sockets"} {
		t.Run(name, func(t *testing.T) {
			result := results.Add(t)
			needsPyTorch(t)
			p := programs.Named(name)
			takeRoom(t, gpuOf(p), p.Host)
			tries := triesWanted(t, 20)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute+time.Duration(tries)*15*time.Second)
			defer cancel()
			spec := specOf(p)
			spec.ID = harness.Name(t)
			k := start(t, true, spec, p.File, slices.Concat(p.Args, []string{"--steps", "1000000", "--file", workFile})...)
			skipUnable(ctx, t, k)
			await(ctx, t, k, "the first steps", func() bool { return parse(t, k.Logs()).last() >= 20 })
			lockInTurn(ctx, t, result, k, tries)
		})
	}
}

// lockInTurn pauses and resumes a container, and fails the test if one of the pauses had no lock.
func lockInTurn(ctx context.Context, t *testing.T, result *harness.TestResult, k *harness.Container, tries int) {
	t.Helper()
	count := func(words string) int { return strings.Count(linesWith(shared.Log(), "id="+k.ID+" "), words) }
	begun := count("phase=lock") // of another container of this name
	driver, turns := count("left to the driver"), count("they went on in turns")
	var longest, all time.Duration
	for try := range tries {
		began := time.Now()
		if out, err := shared.Ctr(ctx, "tasks", "pause", k.ID); err != nil {
			t.Fatal(out, err)
		}
		took := time.Since(began)
		longest, all = max(longest, took), all+took
		for count("phase=lock")+count("without the CUDA lock") == begun+try {
			if ctx.Err() != nil {
				t.Fatal("the shim says nothing of the lock")
			}
			time.Sleep(5 * time.Millisecond)
		}
		if got := count("phase=lock"); got != begun+try+1 {
			t.Fatalf("%d of %d locks came about:\n%s", got-begun, try+1, tail(linesWith(shared.Log(), k.ID)))
		}
		before := parse(t, k.Logs()).last()
		if out, err := shared.Ctr(ctx, "tasks", "resume", k.ID); err != nil {
			t.Fatal(out, err)
		}
		await(ctx, t, k, "a step after the lock", func() bool { return parse(t, k.Logs()).last() > before+2 })
	}
	if withEnvInterposer() {
		if n := count("left to the driver") - driver; n > 0 {
			t.Errorf("the memory was left to the driver %d times:\n%s", n, tail(linesWith(shared.Log(), "left to the driver")))
		}
		result.Number("in_turns_count", float64(count("they went on in turns")-turns))
	}
	t.Logf("%d locks, the longest in %v, on average in %v with ctr's pause", tries, longest, all/time.Duration(tries))
	result.Number("locks_count", float64(tries))
	result.Number("longest_lock_seconds", longest.Seconds())
	result.Number("mean_lock_seconds", (all / time.Duration(tries)).Seconds())
}
