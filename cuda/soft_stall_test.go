// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A driver that does nothing in the middle of a copy is taken for hung long before CopyTimeout. When it
// goes on, the process can be brought back.
func TestSoftDriverHangs(t *testing.T) {
	for _, step := range []string{"checkpoint", "restore"} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			dev, file := devices(t, 1), filepath.Join(t.TempDir(), "softcuda.conf")
			do(t, os.WriteFile(file, nil, 0o600))
			h, ctx := softHelper(t, dev, nil), t.Context()
			w := start(t, dev, []string{"SOFTCUDA_CONF=" + file}, "counter")
			w.counts(101)
			procs, err := Find(ctx, h, []int{w.pid})
			do(t, err)
			do(t, procs.Lock(ctx, h, time.Minute))
			if step == "restore" {
				do(t, procs.Checkpoint(ctx, h))
			}
			do(t, os.WriteFile(file, []byte("hang="+step+"\n"), 0o600))
			impatient := softHelper(t, dev, func(o *Options) { o.StallTimeout = 500 * time.Millisecond })
			do(t, func() error { _, err := impatient.Info(ctx); return err }()) // it is up
			within(t, func() {
				if step == "checkpoint" {
					err = procs.Checkpoint(ctx, impatient)
				} else {
					err = procs.Restore(ctx, impatient, nil)
				}
				wants(t, err, ErrHelperHung, step+" CUDA process", "nothing has moved for 500ms", "undo")
			})
			do(t, os.WriteFile(file, nil, 0o600))
			do(t, settle(ctx, h, w.pid, h.whileItWorks(w.pid)))
			do(t, driveTo(ctx, h, w.pid, Running, h.whileItWorks(w.pid)))
			w.counts(102)
		})
	}
}

// A copy that is slow and moves goes on for much longer than StallTimeout.
func TestSoftDriverIsSlow(t *testing.T) {
	t.Parallel()
	const stall = 1500 * time.Millisecond // longer than a busy machine takes for a step
	dev := devices(t, 1)
	h, ctx := softHelper(t, dev, func(o *Options) { o.StallTimeout = stall }), t.Context()
	w := start(t, dev, []string{"SOFTCUDA_PIECE_MS=3000"}, "counter") // of several pieces
	w.counts(101)
	procs, err := Find(ctx, h, []int{w.pid})
	do(t, err)
	do(t, procs.Lock(ctx, h, time.Minute))
	began := time.Now()
	do(t, procs.Checkpoint(ctx, h))
	if took := time.Since(began); took < 2*stall {
		t.Errorf("the copy took %v: it was to take more than %v", took, 2*stall)
	}
	do(t, procs.Restore(ctx, h, nil))
	do(t, procs.Unlock(ctx, h))
	w.counts(102)
}

// A process of a group whose driver does nothing is not given up while that of another one works: it
// may wait for it.
func TestSoftDriverWaitsForAnother(t *testing.T) {
	for _, step := range []string{"checkpoint", "restore"} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			const stall = 1500 * time.Millisecond // longer than a busy machine takes for a step
			dev, file := devices(t, 2), filepath.Join(t.TempDir(), "softcuda.conf")
			do(t, os.WriteFile(file, nil, 0o600))
			patient, ctx := softHelper(t, dev, nil), t.Context()
			h := softHelper(t, dev, func(o *Options) { o.StallTimeout = stall })
			waits := start(t, dev, []string{"SOFTCUDA_CONF=" + file}, "counter")
			works := start(t, dev, []string{"SOFTCUDA_PIECE_MS=3000"}, "counter")
			all := []*work{waits, works}
			for _, w := range all {
				w.counts(101)
			}
			procs, err := Find(ctx, patient, []int{waits.pid, works.pid})
			do(t, err)
			do(t, procs.Lock(ctx, patient, time.Minute))
			take := procs.Checkpoint
			if step == "restore" {
				do(t, procs.Checkpoint(ctx, patient))
				take = func(ctx context.Context, h *Helper) error { return procs.Restore(ctx, h, nil) }
			}
			do(t, os.WriteFile(file, []byte("hang="+step+"\n"), 0o600))
			do(t, func() error { _, err := h.Info(ctx); return err }()) // it is up
			began := time.Now()
			took := make(chan error, 1)
			go func() { took <- take(ctx, h) }()
			time.Sleep(2 * stall) // in which the other one copies its first piece
			do(t, os.WriteFile(file, nil, 0o600))
			do(t, <-took)
			if took := time.Since(began); took < 3*stall {
				t.Errorf("the copies took %v: one was to wait for %v, and the other to work meanwhile", took, 2*stall)
			}
			if step == "checkpoint" {
				do(t, procs.Restore(ctx, patient, nil))
			}
			do(t, procs.Unlock(ctx, patient))
			for _, w := range all {
				w.counts(102)
			}
		})
	}
}
