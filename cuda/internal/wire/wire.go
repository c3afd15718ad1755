// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package wire holds the requests of package cuda to gpuckpt-cuda-helper, and the replies, which
// package worker carries. Those for one process are served in the order of sending.
package wire

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
)

// JoinEnv names the environment variable with the pid of the process whose mount and pid namespaces
// the helper enters first of all. Package driver's C code reads it under the same name.
const JoinEnv = "_GPUCKPT_JOIN"

// DriverEnv names the environment variable with the directory from which the helper loads the
// driver's libraries. Without it the loader of the host finds them.
const DriverEnv = "_GPUCKPT_DRIVER_DIR"

// VisibleEnv names CUDA's environment variable of the GPUs that a program is to see.
const VisibleEnv = "CUDA_VISIBLE_DEVICES"

// MaxMessage bounds a message in bytes. A reply with 64 GPUs needs about 16 KiB.
const MaxMessage = 64 << 10

// maxGPUs is how many GPUs a driver serves (NV_MAX_DEVICES).
const maxGPUs = 32

// Operations, the values of Request.Op.
const (
	OpInfo          = "info"
	OpState         = "state"
	OpRestoreThread = "restore-tid"
	OpLock          = "lock"
	OpCheckpoint    = "checkpoint"
	OpRestore       = "restore"
	OpUnlock        = "unlock"
	OpSurvey        = "survey"
	OpImported      = "imported"
)

// Request asks for one call of the driver.
type Request struct {
	Op        string `json:"op"`                   // one of the operations
	PID       int    `json:"pid,omitempty"`        // in the helper's pid namespace; 0 for OpInfo
	TimeoutMS uint32 `json:"timeout_ms,omitempty"` // OpLock: milliseconds, 0 waits for ever
	Pairs     []Pair `json:"pairs,omitempty"`      // OpRestore
	Fresh     bool   `json:"fresh,omitempty"`      // OpInfo: do not answer from memory
	Early     bool   `json:"early,omitempty"`      // OpInfo: do not wait for the GPUs to come up, if NVML tells all
	Minors    []int  `json:"minors,omitempty"`     // OpImported: the GPUs to look at, N of /dev/nvidiaN
}

// Pair moves what was on GPU Old to GPU New, both "GPU-" UUIDs.
type Pair struct {
	Old string `json:"old"`
	New string `json:"new"`
}

// Faults, the values of Reply.Fault: why the driver could not be asked.
const (
	FaultNoDriver = "no-driver" // libcuda.so.1 does not load; Text says why
	FaultTooOld   = "too-old"   // it has no checkpoint functions; Text is the version found
	FaultInit     = "init"      // cuInit failed with Code
	FaultModule   = "module"    // the kernel module could not be asked; Text is the step that failed
)

// Reply answers a request.
type Reply struct {
	Fault string `json:"fault,omitempty"`
	Code  int    `json:"code"`            // the CUresult
	Text  string `json:"text,omitempty"`  // the driver's words for Code, or the fault's
	Value int    `json:"value,omitempty"` // OpState: the state; OpRestoreThread: the thread id; OpImported: bytes

	// Answer is a cuda.Info for OpInfo, a cuda.Survey for OpSurvey.
	Answer json.RawMessage `json:"answer,omitempty"`
}

// Check refuses whatever the helper could not carry out exactly as asked.
func (q Request) Check() error {
	switch q.Op {
	case OpInfo, OpSurvey:
		if q.PID != 0 {
			return fmt.Errorf("%s takes no pid", q.Op)
		}
	case OpState, OpRestoreThread, OpLock, OpCheckpoint, OpRestore, OpUnlock, OpImported:
		if q.PID <= 0 || q.PID > math.MaxInt32 {
			return fmt.Errorf("pid %d is none", q.PID)
		}
	default:
		return fmt.Errorf("unknown operation %q", q.Op)
	}
	if q.TimeoutMS != 0 && q.Op != OpLock {
		return fmt.Errorf("%s takes no timeout", q.Op)
	}
	if (q.Fresh || q.Early) && q.Op != OpInfo {
		return fmt.Errorf("%s takes no freshness", q.Op)
	}
	if len(q.Pairs) != 0 && q.Op != OpRestore {
		return fmt.Errorf("%s takes no GPU pairs", q.Op)
	}
	if len(q.Minors) != 0 && q.Op != OpImported {
		return fmt.Errorf("%s takes no minors", q.Op)
	}
	if len(q.Minors) > maxGPUs || slices.ContainsFunc(q.Minors, func(n int) bool { return n < 0 || n > math.MaxUint16 }) {
		return fmt.Errorf("minors %v are none", q.Minors)
	}
	for _, p := range q.Pairs {
		for _, uuid := range []string{p.Old, p.New} {
			if _, err := ParseUUID(uuid); err != nil {
				return err
			}
		}
	}
	return nil
}

// Check refuses what no helper answers.
func (r Reply) Check() error {
	switch {
	case r.Fault != "" && !slices.Contains([]string{FaultNoDriver, FaultTooOld, FaultInit, FaultModule}, r.Fault):
		return fmt.Errorf("unknown fault %q", r.Fault)
	case r.Code < 0:
		return fmt.Errorf("code %d is none", r.Code)
	}
	return nil
}

// ParseUUID reads "GPU-", which may be missing, and a UUID in lower or upper case (nvidia-smi -L).
func ParseUUID(s string) ([16]byte, error) {
	var id [16]byte
	digits := strings.TrimPrefix(s, "GPU-")
	if len(digits) != 36 || digits[8] != '-' || digits[13] != '-' || digits[18] != '-' || digits[23] != '-' {
		return id, fmt.Errorf("%q is not a GPU's UUID", s)
	}
	digits = digits[:8] + digits[9:13] + digits[14:18] + digits[19:23] + digits[24:]
	if _, err := hex.Decode(id[:], []byte(digits)); err != nil {
		return id, fmt.Errorf("%q is not a GPU's UUID", s)
	}
	return id, nil
}

// FormatUUID writes the form that ParseUUID reads, in lower case.
func FormatUUID(id [16]byte) string {
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", id[0:4], id[4:6], id[6:8], id[8:10], id[10:])
}
