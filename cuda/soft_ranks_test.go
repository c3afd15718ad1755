// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// ranks starts two processes whose kernels wait for each other, all the time, on a GPU each. The second
// computes for a while before each of its steps.
func ranks(t *testing.T, dev string, compute time.Duration) (both [2]*work) {
	t.Helper()
	parent := start(t, dev, nil, "ranks", "--procs", "2", "--gpus", "2", "--work", fmt.Sprint(compute.Microseconds()))
	for i := range both {
		w := &work{t: t, port: parent.port + i}
		if _, err := fmt.Sscanf(w.ask("info"), "pid=%d", &w.pid); err != nil {
			t.Fatal(err)
		}
		both[i] = w
	}
	return both
}

// steps returns how many steps a rank has taken, and fails the test if one was wrong.
func (w *work) steps() (n int) {
	w.t.Helper()
	reply := w.ask("steps")
	var bad int
	if _, err := fmt.Sscanf(reply, "steps=%d bad=%d", &n, &bad); err != nil || bad != 0 {
		w.t.Fatalf("a rank answers %q", reply)
	}
	return n
}

func (w *work) goesOn() {
	w.t.Helper()
	before := w.steps()
	for end := time.Now().Add(time.Minute); w.steps() <= before; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			w.t.Fatalf("a rank stands still at step %d", before)
		}
	}
}

// Ranks that take steps without a pause are locked together, in every try, checkpointed and restored.
func TestSoftRanksAreLockedTogether(t *testing.T) {
	dev := devices(t, 2)
	h, ctx := softHelper(t, dev, nil), t.Context()
	both := ranks(t, dev, 20*time.Millisecond)
	for _, w := range both {
		w.goesOn()
	}
	procs, err := Find(ctx, h, []int{both[0].pid, both[1].pid})
	do(t, err)
	if len(procs) != 2 {
		t.Fatalf("found %+v", procs)
	}
	// Asked once, one of them is still waiting when the time is over: else they do not wait for each other.
	once := func() error {
		err := sum(procs.each(func(p Process) error { return h.Lock(ctx, p.PID.Host, 200*time.Millisecond) }))
		do(t, procs.Unlock(ctx, h))
		return err
	}
	for tries := 0; once() == nil; tries++ {
		if tries == 100 {
			t.Fatal("the ranks were locked each time that each was asked once")
		}
	}
	for range 3 {
		do(t, procs.Lock(ctx, h, time.Minute))
		for _, w := range both {
			w.is(h, Locked)
		}
		do(t, procs.Checkpoint(ctx, h))
		do(t, procs.Restore(ctx, h, nil))
		do(t, procs.Unlock(ctx, h))
		for _, w := range both {
			w.goesOn()
		}
	}
}

// A lock of ranks that does not come about leaves them running.
func TestSoftRanksThatAreNotLockedRunOn(t *testing.T) {
	dev := devices(t, 2)
	h, ctx := softHelper(t, dev, nil), t.Context()
	both := ranks(t, dev, time.Hour/2) // the first waits for the second
	procs, err := Find(ctx, h, []int{both[0].pid, both[1].pid})
	do(t, err)
	for tries := 0; ; tries++ { // until the first has launched its step
		err := procs.Lock(ctx, h, 500*time.Millisecond)
		for _, w := range both {
			if err != nil {
				w.is(h, Running)
			}
		}
		if err != nil {
			refused(t, err, NotReady)
			if strings.Contains(err.Error(), "undo") {
				t.Error(err)
			}
			return
		}
		do(t, procs.Unlock(ctx, h))
		if tries == 600 {
			t.Fatal("locked each time")
		}
		time.Sleep(50 * time.Millisecond)
	}
}
