// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestSoftOneFailsTheOthersAreUndone(t *testing.T) {
	dev := devices(t, 2)
	h, ctx := softHelper(t, dev, nil), t.Context()
	good := start(t, dev, nil, "counter")
	bad := start(t, dev, []string{"SOFTCUDA_FAIL=checkpoint:304"}, "counter", "--gpu", "1")
	good.counts(101)
	bad.counts(101)
	procs, err := Find(ctx, h, []int{good.pid, bad.pid})
	do(t, err)
	do(t, procs.Lock(ctx, h, time.Second))
	refused(t, procs.Checkpoint(ctx, h), OperatingSystem)
	good.is(h, Locked)
	bad.is(h, Locked)
	do(t, procs.Unlock(ctx, h))
	good.counts(102)
	bad.counts(102)
}

// What somebody has undone by hand, or has ended, is no error on the way back.
func TestSoftGroupUndoneByHand(t *testing.T) {
	dev := devices(t, 1)
	h, ctx := softHelper(t, dev, nil), t.Context()
	w, dies := start(t, dev, nil, "counter"), start(t, dev, nil, "counter")
	w.counts(101)
	dies.counts(101)
	procs, err := Find(ctx, h, []int{w.pid, dies.pid})
	do(t, err)
	do(t, procs.Lock(ctx, h, time.Second))
	do(t, procs[:1].Checkpoint(ctx, h))
	do(t, h.Restore(ctx, w.pid, nil))
	do(t, procs[:1].Restore(ctx, h, nil))
	w.is(h, Locked)
	do(t, h.Unlock(ctx, w.pid))
	do(t, syscall.Kill(dies.pid, syscall.SIGKILL))
	for may := true; may; time.Sleep(time.Millisecond) {
		may, err = MayUseCUDA(dies.pid)
		do(t, err)
	}
	do(t, procs.Unlock(ctx, h))
	w.counts(102)
}

// Whatever ends a checkpoint midway, the group is locked again afterwards,
// although the driver's thread in the process goes on with it for a while.
func TestSoftCheckpointLostMidway(t *testing.T) {
	for name, end := range map[string]struct {
		by   func(h *Helper, cancel func())
		want error
	}{
		"helper killed":  {func(h *Helper, _ func()) { h.worker.Kill() }, ErrHelperGone},
		"call cancelled": {func(_ *Helper, cancel func()) { cancel() }, context.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			dev := devices(t, 2)
			h := softHelper(t, dev, nil)
			slow := start(t, dev, []string{"SOFTCUDA_CHECKPOINT_DELAY_MS=4000"}, "counter")
			quick := start(t, dev, nil, "counter", "--gpu", "1")
			slow.counts(101)
			quick.counts(101)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			procs, err := Find(ctx, h, []int{slow.pid, quick.pid})
			do(t, err)
			do(t, procs.Lock(ctx, h, time.Second))
			ended := make(chan error)
			go func() { ended <- procs.Checkpoint(ctx, h) }()
			waitForCalls(t, h, 1) // the quick one is done
			other := softHelper(t, dev, nil)
			for s := Locked; s != Checkpointed; {
				s, err = other.State(t.Context(), quick.pid)
				do(t, err)
			}
			end.by(h, cancel)
			within(t, func() {
				err := <-ended
				wants(t, err, end.want)
				if strings.Contains(err.Error(), "undo") {
					t.Errorf("undo failed: %v", err)
				}
			})
			slow.is(other, Locked)
			quick.is(other, Locked)
			do(t, procs.Unlock(t.Context(), other))
			slow.counts(102)
			quick.counts(102)
		})
	}
}
