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

// MaxMessage bounds a message in bytes. A reply with 64 GPUs needs about 16 KiB, a request with
// MaxSpans 90 KiB at most.
const MaxMessage = 128 << 10

// MaxPieces and MaxSpans are how many of a request's are served at a time. A message carries 253 files.
const (
	MaxPieces = 64
	MaxSpans  = 1024
)

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
	OpMemoryOn      = "memory-on"
	OpReaches       = "reaches"
	OpReady         = "ready"
	OpCopyOut       = "copy-out"
	OpCopyIn        = "copy-in"
)

// Request asks for one call of the driver.
type Request struct {
	Op        string `json:"op"`                   // one of the operations
	PID       int    `json:"pid,omitempty"`        // in the helper's pid namespace; 0 for OpInfo
	TimeoutMS uint32 `json:"timeout_ms,omitempty"` // OpLock: milliseconds, 0 waits for ever
	Pairs     []Pair `json:"pairs,omitempty"`      // OpRestore
	Fresh     bool   `json:"fresh,omitempty"`      // OpInfo: do not answer from memory
	Early     bool   `json:"early,omitempty"`      // OpInfo: do not wait for the GPUs to come up, if NVML tells all
	Minors    []int  `json:"minors,omitempty"`     // OpMemoryOn: the GPUs to look at, N of /dev/nvidiaN

	GPU      string   `json:"gpu,omitempty"`      // OpReady, OpCopyIn: the UUID of the GPU that is to have the memory
	Threads  int      `json:"threads,omitempty"`  // OpReady, OpCopyOut, OpCopyIn: how many copy; 0: one for each processor
	Pieces   []uint64 `json:"pieces,omitempty"`   // OpCopyOut, OpCopyIn: bytes of each piece of memory, in their order
	NoKernel bool     `json:"noKernel,omitempty"` // OpCopyOut: the GPU runs nothing for it, and so digests nothing
	Offset   uint64   `json:"offset,omitempty"`   // OpCopyOut: where in the file the first piece goes
	Part     int      `json:"part,omitempty"`     // OpCopyOut, OpCopyIn: the number of the first MiB of the pieces in what is digested
	Spans    []Span   `json:"spans,omitempty"`    // OpCopyIn: what fills the pieces, in their order
}

// Span is a range of one of the files that come with a request.
type Span struct {
	File   int    `json:"file"` // counted from 0; -1: the bytes are zeros
	Offset uint64 `json:"offset,omitempty"`
	Bytes  uint64 `json:"bytes"`
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
	FaultFile     = "file"      // a file could not be read or written; Text is the step, Code the errno or 0
)

// Reply answers a request.
type Reply struct {
	Fault string `json:"fault,omitempty"`
	Code  int    `json:"code"`            // the CUresult
	Text  string `json:"text,omitempty"`  // the driver's words for Code, or the fault's
	Short bool   `json:"short,omitempty"` // FaultFile: the file has fewer bytes than the spans
	// Digested says that the last file of an answer to OpCopyOut or OpCopyIn has the digests' values.
	Digested bool `json:"digested,omitempty"`
	Value    int  `json:"value,omitempty"` // OpState: the state; OpRestoreThread: the thread id; OpReaches: 1 if it does

	// Answer is a cuda.Info for OpInfo, a cuda.Survey for OpSurvey, []cuda.MemoryOn for OpMemoryOn.
	Answer json.RawMessage `json:"answer,omitempty"`
}

// Check refuses what the helper could not carry out. A field that an operation has no use for says nothing.
func (q Request) Check() error {
	switch q.Op {
	case OpInfo, OpSurvey, OpReady, OpCopyOut, OpCopyIn:
	case OpState, OpRestoreThread, OpLock, OpCheckpoint, OpRestore, OpUnlock, OpMemoryOn, OpReaches:
		if q.PID <= 0 || q.PID > math.MaxInt32 {
			return fmt.Errorf("pid %d is none", q.PID)
		}
	default:
		return fmt.Errorf("unknown operation %q", q.Op)
	}
	if len(q.Minors) > maxGPUs || slices.ContainsFunc(q.Minors, func(n int) bool { return n < 0 || n > math.MaxUint16 }) {
		return fmt.Errorf("minors %v are none", q.Minors)
	}
	if err := q.checkCopy(); err != nil {
		return err
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

// checkCopy refuses copies that make no sense.
func (q Request) checkCopy() error {
	if q.Threads < 0 {
		return fmt.Errorf("%s takes no %d threads", q.Op, q.Threads)
	}
	if len(q.Pieces) > MaxPieces || len(q.Spans) > MaxSpans {
		return fmt.Errorf("%d pieces and %d spans are too many", len(q.Pieces), len(q.Spans))
	}
	if q.Op == OpCopyIn || q.Op == OpReady {
		if _, err := ParseUUID(q.GPU); err != nil {
			return err
		}
	}
	const most = math.MaxInt64 / (MaxSpans + 1) // so that no sum overflows
	var memory, spans uint64
	for _, bytes := range q.Pieces {
		if memory += bytes; bytes == 0 || bytes > most {
			return fmt.Errorf("a piece has %d bytes", bytes)
		}
	}
	for _, s := range q.Spans {
		if spans += s.Bytes; s.Bytes == 0 || s.Bytes > most || s.Offset > most || s.File < -1 || s.File >= MaxSpans {
			return fmt.Errorf("file %d has no span of %d bytes at %d", s.File, s.Bytes, s.Offset)
		}
	}
	if q.Op == OpCopyIn && memory != spans {
		return fmt.Errorf("%d bytes do not fill %d", spans, memory)
	}
	if q.Offset > most {
		return fmt.Errorf("a file has no offset %d", q.Offset)
	}
	if q.Part < 0 || q.Part > math.MaxInt32 {
		return fmt.Errorf("nothing digested has %d MiB", q.Part)
	}
	return nil
}

// Check refuses what no helper answers.
func (r Reply) Check() error {
	switch {
	case r.Fault != "" && !slices.Contains([]string{FaultNoDriver, FaultTooOld, FaultInit, FaultModule, FaultFile}, r.Fault):
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
