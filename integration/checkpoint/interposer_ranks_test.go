// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// stepsOf returns how many steps a rank has taken, and fails the test if the sum of one was wrong.
func stepsOf(t *testing.T, k *harness.Container) (steps int) {
	t.Helper()
	var bad int
	reply := k.Answer(t, "steps")
	if _, err := fmt.Sscanf(reply, "steps=%d bad=%d", &steps, &bad); err != nil || bad != 0 {
		t.Fatalf("a rank answers %q", reply)
	}
	return steps
}

// stepOn waits until each rank has taken a step more.
func stepOn(t *testing.T, k *harness.Container, ranks int) {
	t.Helper()
	for n := range ranks {
		before := stepsOf(t, k.Process(n))
		for end := time.Now().Add(time.Minute); stepsOf(t, k.Process(n)) <= before; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("rank %d stands still after step %d\n%s", n, before, shared.LogTail(4000))
			}
		}
	}
}

// Ranks that wait for each other, a GPU each, step after step, with the interposer: they are paused,
// checkpointed and restored, and their interposers have the memory each time, not the driver. No step is lost or
// taken twice. (internal/gpu/interposer parks such ranks more often.)
func TestInterposerRanks(t *testing.T) {
	shared.Configured(t, "lock_timeout = \"1m\"\n") // for slow machines
	ranks := min(4, len(gpu.Devices))
	if ranks < 2 {
		t.Skip("one GPU: the driver does not interrupt the kernels of processes that it has restored, so these would wait for each other for ever")
	}
	spec := withInterposer()
	spec.Ports = ranks
	spec.GPUs = nil
	for n := range ranks {
		spec.GPUs = append(spec.GPUs, n)
	}
	k := shared.Work(t, spec, "ranks", "--procs", strconv.Itoa(ranks), "--gpus", strconv.Itoa(ranks), "--work", "500", "--ahead", "3", "--share", "large", "--bytes", "4M")
	logged := func(words string) int { return strings.Count(shared.Log(), words) }
	inTurns, driver := logged("they went on in turns"), logged("left to the driver")
	stepOn(t, k, ranks)
	for range 6 {
		ctr(t, shared, "tasks", "pause", k.ID)
		ctr(t, shared, "tasks", "resume", k.ID)
		stepOn(t, k, ranks)
	}
	for _, name := range []string{"1", "2"} {
		ref := takeCheckpoint(t, shared, k, name)
		stepOn(t, k, ranks) // left running
		for i, p := range metadataOf(t, shared, ref).Processes {
			if len(p.Areas) != 2 || p.Areas[0].Bytes != 4<<20 {
				t.Errorf("process %d has %+v", i, p.Areas)
			}
		}
		k.MustRemove(t)
		k = restore(t, shared, k.ID, ref, k.Port)
		stepOn(t, k, ranks)
	}
	if now := logged("left to the driver"); now != driver {
		t.Errorf("the memory was left to the driver %d times\n%s", now-driver, shared.LogTail(4000))
	}
	if logged("they went on in turns") == inTurns {
		t.Error("the ranks never had turns: they hardly wait for each other")
	}
}
