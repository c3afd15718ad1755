// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
)

func TestErrorReads(t *testing.T) {
	for _, c := range []struct {
		err  Error
		want string
	}{
		{Error{Op: "lock", PID: 123, Result: NotReady, Hint: "wait"}, "lock CUDA process 123: CUDA_ERROR_NOT_READY (600): device not ready: wait"},
		{Error{Op: "checkpoint", PID: 1, Result: NotSupported, Text: "no"}, "checkpoint CUDA process 1: CUDA_ERROR_NOT_SUPPORTED (801): no"},
		{Error{Op: "state", PID: 1, Result: 4711}, "get state of CUDA process 1: CUresult 4711 (4711): unknown error"},
		{Error{Op: "restore-tid", PID: 1, Result: NotInitialized}, "get restore-tid of CUDA process 1: CUDA_ERROR_NOT_INITIALIZED (3): initialization error"},
		{Error{Op: "init", Result: NoDevice}, "initialise CUDA: CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device is detected"},
	} {
		if got := c.err.Error(); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
	}
}

func TestNotCUDAIsOnlyWhatTheQueriesAnswer(t *testing.T) {
	for _, c := range []struct {
		op   string
		r    Result
		want bool
	}{
		{"state", NotInitialized, true},
		{"state", InvalidValue, true},
		{"restore-tid", NotInitialized, true},
		{"restore-tid", OperatingSystem, false},
		{"lock", NotInitialized, false}, // the driver answers it now and then while it is busy
		{"restore", InvalidValue, false},
		{"init", NotInitialized, false},
	} {
		if got := errors.Is(&Error{Op: c.op, PID: 1, Result: c.r}, ErrNotCUDA); got != c.want {
			t.Errorf("%s, %v: %v", c.op, c.r, got)
		}
	}
}

func TestHintsNameTheCause(t *testing.T) {
	for _, c := range []struct {
		op   string
		r    Result
		want string
	}{
		{"checkpoint", NotSupported, "cudaMallocManaged"},
		{"lock", NotReady, "timeout"},
		{"restore", InvalidValue, "every checkpointed GPU"},
		{"unlock", IllegalState, "state"},
		{"init", NoDevice, "/dev/nvidia"},
		{"unlock", Unknown, ""},
	} {
		if got := hint(c.op, c.r); !strings.Contains(got, c.want) || c.want == "" && got != "" {
			t.Errorf("%s, %v: %q", c.op, c.r, got)
		}
	}
}

func TestStateNames(t *testing.T) {
	for s, name := range map[State]string{
		Running: "running", Locked: "locked", Checkpointed: "checkpointed", Failed: "failed", 77: "unknown(77)",
	} {
		if s.String() != name {
			t.Errorf("%d: %s", int(s), s)
		}
	}
	var s State
	b, err := json.Marshal(Checkpointed)
	if err != nil || json.Unmarshal(b, &s) != nil || s != Checkpointed {
		t.Errorf("checkpointed came back from %s as %v", b, s)
	}
	if err := json.Unmarshal([]byte(`"asleep"`), &s); err == nil {
		t.Error("an unknown state was read")
	}
}

func TestParsePairs(t *testing.T) {
	const a, b = "GPU-5af7c0da-0000-4000-8000-00000000000a", "GPU-5af7c0da-0000-4000-8000-00000000000b"
	got, err := ParsePairs(a + "=" + b + "," + strings.TrimPrefix(b, "GPU-") + "=" + a)
	if err != nil || len(got) != 2 || got[0] != (Pair{Old: a, New: b}) || got[1] != (Pair{Old: b, New: a}) {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err := ParsePairs(""); got != nil || err != nil {
		t.Errorf("no map: %v, %v", got, err)
	}
	for _, bad := range []string{a, a + ":" + b, a + "=" + b + ",", a + "=" + b + "," + a + "=" + a,
		a + "=" + b + "," + b + "=" + b, "0=1", "=" + b} {
		if got, err := ParsePairs(bad); err == nil {
			t.Errorf("%q was read as %v", bad, got)
		}
	}
}

// The driver's refusal of a restore is found wherever it is in an error, also beside others.
func TestRestoreRefusal(t *testing.T) {
	refused := &Error{Op: "restore", PID: 2, Result: InvalidValue}
	other := &Error{Op: "checkpoint", PID: 1, Result: OutOfMemory}
	for name, test := range map[string]struct {
		err  error
		want *Error
	}{
		"none":         {nil, nil},
		"another step": {fmt.Errorf("save: %w", other), nil},
		"alone":        {fmt.Errorf("give back: %w", refused), refused},
		"on the way":   {fmt.Errorf("save: %w", fmt.Errorf("%w; undo: %w", other, sum([]error{ErrHelperGone, refused}))), refused},
	} {
		if got := RestoreRefusal(test.err); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}
