// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
)

// group asks a fake helper for the processes with pids from 1 on, as Find would.
func group(t *testing.T, h *Helper, n int) Group {
	t.Helper()
	var procs Group
	for pid := 1; pid <= n; pid++ {
		s, err := h.State(t.Context(), pid)
		if err != nil {
			t.Fatal(err)
		}
		procs = append(procs, Process{PID: PID{Host: pid}, State: s})
	}
	return procs
}

// states fails the test unless the processes have these states.
func states(t *testing.T, h *Helper, want ...State) {
	t.Helper()
	var got []State
	for i := range want {
		s, err := h.State(t.Context(), i+1)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, s)
	}
	if !slices.Equal(got, want) {
		t.Errorf("states are %v, want %v", got, want)
	}
}

func TestGroupGoesThereAndBack(t *testing.T) {
	h := fake(t, "machine:1=running;2=locked;3=checkpointed", nil)
	procs := group(t, h, 3)
	for _, step := range []struct {
		name string
		do   func() error
		want []State
	}{
		{"lock", func() error { return procs.Lock(t.Context(), h, time.Second) }, []State{Locked, Locked, Checkpointed}},
		{"checkpoint", func() error { return procs.Checkpoint(t.Context(), h) }, []State{Checkpointed, Checkpointed, Checkpointed}},
		{"restore", func() error { return procs.Restore(t.Context(), h, nil) }, []State{Locked, Locked, Checkpointed}},
		{"unlock", func() error { return procs.Unlock(t.Context(), h) }, []State{Running, Locked, Checkpointed}},
	} {
		if err := step.do(); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		states(t, h, step.want...)
	}
}

func TestFailedLockUnlocksTheOthers(t *testing.T) {
	h := fake(t, "machine:1=running;2=running;3=locked;!lock 2=600", nil)
	err := group(t, h, 3).Lock(t.Context(), h, 200*time.Millisecond)
	var e *Error
	if !errors.As(err, &e) || e.PID != 2 || e.Result != NotReady {
		t.Errorf("got %v", err)
	}
	states(t, h, Running, Running, Locked)
}

func TestLockRefusesAFailedProcessFirst(t *testing.T) {
	h := fake(t, "machine:1=running;2=failed", nil)
	err := group(t, h, 2).Lock(t.Context(), h, time.Second)
	if err == nil || !strings.Contains(err.Error(), "process 2: it is failed") {
		t.Errorf("got %v", err)
	}
	states(t, h, Running, Failed)
}

func TestFailedCheckpointRestoresTheOthers(t *testing.T) {
	h := fake(t, "machine:1=running;2=running;3=checkpointed;!checkpoint 2=801", nil)
	procs := group(t, h, 3)
	if err := procs.Lock(t.Context(), h, time.Second); err != nil {
		t.Fatal(err)
	}
	err := procs.Checkpoint(t.Context(), h)
	var e *Error
	if !errors.As(err, &e) || e.PID != 2 || e.Result != NotSupported || !strings.Contains(err.Error(), "cudaMallocManaged") {
		t.Errorf("got %v", err)
	}
	states(t, h, Locked, Locked, Checkpointed)
	if err := procs.Unlock(t.Context(), h); err != nil {
		t.Error(err)
	}
	states(t, h, Running, Running, Checkpointed)
}

func TestFailedRestoreCheckpointsTheOthersAgain(t *testing.T) {
	h := fake(t, "machine:1=running;2=running;!restore 2=2", nil)
	procs := group(t, h, 2)
	if err := procs.Lock(t.Context(), h, time.Second); err != nil {
		t.Fatal(err)
	}
	if err := procs.Checkpoint(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	err := procs.Restore(t.Context(), h, nil)
	var e *Error
	if !errors.As(err, &e) || e.PID != 2 || e.Result != OutOfMemory {
		t.Errorf("got %v", err)
	}
	states(t, h, Checkpointed, Checkpointed)
}

func TestUnlockUnlocksAllItCan(t *testing.T) {
	h := fake(t, "machine:1=running;2=running;!unlock 1=999", nil)
	procs := group(t, h, 2)
	if err := procs.Lock(t.Context(), h, time.Second); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // does not stop it
	err := procs.Unlock(ctx, h)
	var e *Error
	if !errors.As(err, &e) || e.PID != 1 {
		t.Errorf("got %v", err)
	}
	states(t, h, Locked, Running)
}

func TestUndoThatFailsIsToldOf(t *testing.T) {
	h := fake(t, "machine:1=running;2=running;!checkpoint 2=801;!restore 1=304", nil)
	procs := group(t, h, 2)
	if err := procs.Lock(t.Context(), h, time.Second); err != nil {
		t.Fatal(err)
	}
	err := procs.Checkpoint(t.Context(), h)
	if err == nil || !strings.Contains(err.Error(), "undo: restore CUDA process 1") {
		t.Errorf("got %v", err)
	}
}

// A helper brings the GPUs up in the background: that it could not, a step may be
// the first to hear.
func TestDriverThatNeverCameUpNeedsNoUndo(t *testing.T) {
	h := fake(t, "no device", nil)
	err := Group{{PID: PID{Host: 1}, State: Running}, {PID: PID{Host: 2}, State: Running}}.Restore(t.Context(), h, nil)
	var e *Error
	if !errors.As(err, &e) || e.Op != "init" || e.Result != NoDevice || strings.Contains(err.Error(), "undo") {
		t.Errorf("got %v", err)
	}
}

func TestProcessThatEndedNeedsNoUndo(t *testing.T) {
	h := fake(t, "machine:1=running", nil)
	procs := append(group(t, h, 1), Process{PID: PID{Host: 2}, State: Running}) // unknown to the driver by now
	err := procs.Lock(t.Context(), h, time.Second)
	if err == nil || strings.Contains(err.Error(), "undo") {
		t.Errorf("got %v", err)
	}
	states(t, h, Running)
}

func TestCancelledStepIsUndone(t *testing.T) {
	h := fake(t, "machine:1=running;2=running", nil)
	procs := group(t, h, 2)
	if err := procs.Lock(t.Context(), h, time.Second); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wants(t, procs.Checkpoint(ctx, h), context.Canceled)
	states(t, h, Locked, Locked)
}

func TestToggle(t *testing.T) {
	h := fake(t, "machine:1=running;2=locked;3=running;!checkpoint 3=801", nil)
	for _, want := range []State{Checkpointed, Running} {
		if s, err := Toggle(t.Context(), h, 1, 0, nil); err != nil || s != want {
			t.Errorf("got %v, %v, want %v", s, err, want)
		}
		states(t, h, want)
	}
	if _, err := Toggle(t.Context(), h, 2, 0, nil); err == nil {
		t.Error("a locked process was toggled")
	}
	if _, err := Toggle(t.Context(), h, 3, 0, nil); err == nil {
		t.Error("no error of the checkpoint")
	}
	states(t, h, Running, Locked, Running)
}
