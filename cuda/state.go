// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"cmp"
	"fmt"
)

// Result is the driver's answer to a call, a CUresult.
type Result int

// The answers that callers of this package act on. The checkpoint functions document Success,
// InvalidValue, NotInitialized, IllegalState, NotReady and NotSupported.
const (
	Success         Result = 0
	InvalidValue    Result = 1
	OutOfMemory     Result = 2
	NotInitialized  Result = 3
	NoDevice        Result = 100
	OperatingSystem Result = 304
	IllegalState    Result = 401
	NotReady        Result = 600
	NotPermitted    Result = 800
	NotSupported    Result = 801
	Unknown         Result = 999
)

// results holds each code's name in cuda.h and the driver's words for it (cuGetErrorString), for
// the calls of this package and the general ones.
var results = map[Result]struct{ name, text string }{
	0:   {"CUDA_SUCCESS", "no error"},
	1:   {"CUDA_ERROR_INVALID_VALUE", "invalid argument"},
	2:   {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
	3:   {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
	4:   {"CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
	34:  {"CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
	46:  {"CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
	100: {"CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
	101: {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
	201: {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
	205: {"CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
	214: {"CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
	302: {"CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND", "shared object symbol not found"},
	303: {"CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", "shared object initialization failed"},
	304: {"CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
	400: {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
	401: {"CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
	500: {"CUDA_ERROR_NOT_FOUND", "named symbol not found"},
	600: {"CUDA_ERROR_NOT_READY", "device not ready"},
	700: {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
	702: {"CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
	719: {"CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
	800: {"CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
	801: {"CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
	802: {"CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
	803: {"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
	804: {"CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "forward compatibility was attempted on non supported HW"},
	805: {"CUDA_ERROR_MPS_CONNECTION_FAILED", "MPS client failed to connect to the MPS control daemon or the MPS server"},
	909: {"CUDA_ERROR_TIMEOUT", "wait operation timed out"},
	999: {"CUDA_ERROR_UNKNOWN", "unknown error"},
}

// String returns the code's name in cuda.h, such as CUDA_ERROR_NOT_READY.
func (r Result) String() string { return cmp.Or(results[r].name, fmt.Sprintf("CUresult %d", int(r))) }

// Text returns the driver's words for the code, such as "device not ready", or "unknown error".
func (r Result) Text() string { return cmp.Or(results[r].text, results[Unknown].text) }

// State is where a CUDA process stands, the driver's CUprocessState.
type State int

// The driver's values; from CUDA 13.4 on Checkpointing and Restoring while a step is under way.
const (
	Running       State = 0 // CUDA calls go through
	Locked        State = 1 // CUDA calls block, submitted work is done
	Checkpointed  State = 2 // GPU memory is in host memory, no device is held
	Failed        State = 3 // a step failed beyond repair
	Checkpointing State = 4
	Restoring     State = 5
)

var stateNames = map[State]string{
	Running: "running", Locked: "locked", Checkpointed: "checkpointed",
	Failed: "failed", Checkpointing: "checkpointing", Restoring: "restoring",
}

// String returns the state as NVIDIA's cuda-checkpoint prints it.
func (s State) String() string {
	if name, ok := stateNames[s]; ok {
		return name
	}
	return fmt.Sprintf("unknown(%d)", int(s))
}

// MarshalText writes the state's name.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads a name that MarshalText wrote and refuses any other.
func (s *State) UnmarshalText(name []byte) (err error) {
	*s, err = ParseState(string(name))
	return err
}

// ParseState returns the state with a name of String's.
func ParseState(name string) (State, error) {
	for state, n := range stateNames {
		if n == name {
			return state, nil
		}
	}
	return 0, fmt.Errorf("unknown CUDA process state %q", name)
}
