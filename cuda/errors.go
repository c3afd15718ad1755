// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
)

var (
	// ErrNotCUDA reports that a process has no CUDA state, or has ended.
	ErrNotCUDA = errors.New("not a CUDA process")
	// ErrNoDriver reports that libcuda.so.1 could not be loaded.
	ErrNoDriver = errors.New("no NVIDIA driver")
	// ErrDriverTooOld reports that the driver has no checkpoint functions.
	ErrDriverTooOld = errors.New("NVIDIA driver too old")
	// ErrNotReported reports that the driver's kernel module does not tell what it was asked.
	ErrNotReported = errors.New("the driver does not report it")
	// ErrHelperGone reports that the helper ended before it answered.
	ErrHelperGone = errors.New("CUDA helper is gone")
	// ErrHelperHung reports that the helper did not answer in time and was killed.
	ErrHelperHung = errors.New("CUDA helper did not answer and was killed")
	// ErrHelperGarbled reports that the helper's answer made no sense; it was killed.
	ErrHelperGarbled = errors.New("CUDA helper answered garbage and was killed")
)

// Error is a call that the driver refused. Helper.State has the state then.
type Error struct {
	Op     string // "lock", "checkpoint", "restore", "unlock", "state", "restore-tid", "info", "init", "ready", "copy-out" or "copy-in"
	PID    int    // as the helper's namespace counts; 0 where there is no process
	Result Result
	Text   string // the driver's words; empty: Result's
	Hint   string // what it means here and what to do; may be empty
}

// Error reads "lock CUDA process 123: CUDA_ERROR_NOT_READY (600): device not ready: hint".
func (e *Error) Error() string {
	text := fmt.Sprintf("%s: %s (%d): %s", doing(e.Op, e.PID), e.Result, int(e.Result), cmp.Or(e.Text, e.Result.Text()))
	if e.Hint != "" {
		text += ": " + e.Hint
	}
	return text
}

func doing(op string, pid int) string {
	switch op {
	case wire.OpState, wire.OpRestoreThread:
		return fmt.Sprintf("get %s of CUDA process %d", op, pid)
	case wire.OpInfo:
		return "get CUDA devices"
	case wire.OpSurvey:
		return "survey GPUs"
	case wire.OpMemoryOn:
		return fmt.Sprintf("look for GPU memory that process %d shares", pid)
	case wire.OpReaches:
		return fmt.Sprintf("look for GPU memory that process %d has mapped for another GPU", pid)
	case wire.OpReady:
		return "make ready to copy GPU memory"
	case wire.OpCopyOut:
		return "copy GPU memory to a file"
	case wire.OpCopyIn:
		return "copy a file to GPU memory"
	case opInit:
		return "initialise CUDA"
	}
	return fmt.Sprintf("%s CUDA process %d", op, pid)
}

// Is makes an ErrNotCUDA of the two answers that mean that a process has no CUDA state.
//
// NVIDIA documents neither; Dynamo's snapshot helper takes both for it as well (ai-dynamo/snapshot,
// agent/cmd/cuda-checkpoint-helper). Other operations answer the same codes for other reasons, and
// a cuInit that failed has the Op "init".
func (e *Error) Is(target error) bool {
	return target == ErrNotCUDA && (e.Op == wire.OpState || e.Op == wire.OpRestoreThread) &&
		(e.Result == NotInitialized || e.Result == InvalidValue)
}

// RestoreRefusal returns the driver's refusal of a restore that err has in it, also of one that was to
// undo another step; nil if there is none.
func RestoreRefusal(err error) *Error {
	if refused, ok := err.(*Error); ok && refused.Op == wire.OpRestore { //nolint:errorlint // each error is looked at
		return refused
	}
	var within []error
	switch e := err.(type) { //nolint:errorlint // likewise
	case interface{ Unwrap() error }:
		within = []error{e.Unwrap()}
	case interface{ Unwrap() []error }:
		within = e.Unwrap()
	}
	for _, e := range within {
		if refused := RestoreRefusal(e); refused != nil {
			return refused
		}
	}
	return nil
}

// opInit is the Op of an Error when cuInit failed, which no request asks for.
const opInit = "init"

// hint returns what an answer means for the step that got it, by the CUDA driver API reference, the
// issues of NVIDIA/cuda-checkpoint and this project's measurements.
func hint(op string, r Result) string {
	switch {
	case op == opInit && r == NoDevice:
		return "no GPU is visible: are the device files /dev/nvidia* there and allowed?"
	case op == opInit && r == OperatingSystem:
		return "the device files /dev/nvidia* are missing or not allowed here"
	case op == opInit && r == 803:
		return "libcuda and the kernel module are of different versions: was the driver updated without a reboot?"
	case (op == wire.OpState || op == wire.OpRestoreThread) && (r == NotInitialized || r == InvalidValue):
		return "not a CUDA process, or it ended"
	case op == wire.OpLock && r == NotReady:
		return "work was still running on the GPU when the timeout ended; the process runs on: retry with a longer timeout"
	case op == wire.OpLock && r == NotSupported:
		// Driver 580 on an H200, while CUPTI traces and when it has ended.
		return "a profiler is at work in the process, or was (CUPTI: torch.profiler, nsys, ncu), or it has something else that this driver cannot lock: start it without; it runs on"
	case op == wire.OpCheckpoint && r == NotSupported:
		return "it uses managed memory (cudaMallocManaged, UVM), of which dev.gpuckpt.interposer takes over allocations of up to 1 MiB, or another feature that this driver cannot checkpoint; it stays locked and runs on once unlocked"
	case op == wire.OpCheckpoint && r == Unknown:
		// Driver 580 on an H200, with managed memory: 801 the first time, 999 from then on.
		return "if the driver has refused this process before, the reason it gave then holds still (managed memory, for one); it stays locked and runs on once unlocked"
	case op == wire.OpRestore && r == InvalidValue:
		return "GPU pairs must name every checkpointed GPU once and lead to different GPUs that are visible here; without pairs it means that the driver cannot restore the process"
	case op == wire.OpRestore && r == NotSupported:
		return "the GPUs visible here do not match those of the checkpoint (model, count, or seen from the wrong namespace)"
	case op == wire.OpRestore && r == OutOfMemory:
		// NVIDIA/cuda-checkpoint#44: later restores of the process answer 304.
		return "the GPU has too little free memory; the driver may refuse later restores of this process too"
	case r == IllegalState:
		return "the process is not in the state this step starts from"
	case r == OperatingSystem:
		return "the process has ended, or the driver cannot reach it or a device: root is needed, in its namespaces or above"
	}
	return ""
}

// sum makes one error in one line of those that are not nil.
func sum(errs []error) error {
	var all error
	for _, err := range errs {
		switch {
		case err == nil:
		case all == nil:
			all = err
		default:
			all = fmt.Errorf("%w; %w", all, err)
		}
	}
	return all
}
