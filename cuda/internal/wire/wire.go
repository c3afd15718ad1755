// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package wire is the protocol between package cuda and gpuckpt-cuda-helper:
// one JSON message per packet of a SOCK_SEQPACKET socket pair, whose far end
// the helper has as file descriptor 3.
//
// A request lives from its packet until the reply with the same id. Requests
// for different processes are served at once, those for one process in the
// order in which they were sent. Both sides come from one build, so a message
// with anything unknown in it is refused rather than guessed at. SEQPACKET
// keeps the messages' bounds: neither side ever has to find one in a stream.
package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
)

// FD is the helper's end of the socket pair.
const FD = 3

// JoinEnv names the environment variable that makes the helper enter the mount
// and pid namespaces of the process whose pid it holds, before it does anything
// else. Package driver's C code reads it under the same name.
const JoinEnv = "_GPUCKPT_JOIN"

// VisibleEnv names CUDA's environment variable that says which GPUs a program
// is to see. A helper has a list of UUIDs there, or none.
const VisibleEnv = "CUDA_VISIBLE_DEVICES"

// MaxMessage bounds a message in bytes. A reply with 64 GPUs needs about 16 KiB.
const MaxMessage = 64 << 10

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
)

// Request asks for one call of the driver.
type Request struct {
	ID        uint64 `json:"id"`                   // unique in the helper's life, not 0
	Op        string `json:"op"`                   // one of the operations
	PID       int    `json:"pid,omitempty"`        // in the helper's pid namespace; 0 for OpInfo
	TimeoutMS uint32 `json:"timeout_ms,omitempty"` // OpLock: milliseconds, 0 waits for ever
	Pairs     []Pair `json:"pairs,omitempty"`      // OpRestore
	Fresh     bool   `json:"fresh,omitempty"`      // OpInfo: do not answer from memory
	Early     bool   `json:"early,omitempty"`      // OpInfo: do not wait for the GPUs to come up, if NVML tells all
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
)

// Reply answers the request of the same id.
type Reply struct {
	ID    uint64 `json:"id"`
	Fault string `json:"fault,omitempty"`
	Code  int    `json:"code"`            // the CUresult
	Text  string `json:"text,omitempty"`  // the driver's words for Code, or the fault's
	Value int    `json:"value,omitempty"` // OpState: the state; OpRestoreThread: the thread id

	// Answer is a cuda.Info for OpInfo, a cuda.Survey for OpSurvey; see DecodeAnswer.
	Answer json.RawMessage `json:"answer,omitempty"`
}

// DecodeRequest reads one request and refuses whatever the helper could not
// carry out exactly as asked.
func DecodeRequest(b []byte) (Request, error) {
	var q Request
	if err := decode(b, &q); err != nil {
		return Request{}, fmt.Errorf("decode request: %w", err)
	}
	if err := q.check(); err != nil {
		return Request{}, fmt.Errorf("request %d: %w", q.ID, err)
	}
	return q, nil
}

func (q Request) check() error {
	if q.ID == 0 {
		return errors.New("no id")
	}
	switch q.Op {
	case OpInfo, OpSurvey:
		if q.PID != 0 {
			return fmt.Errorf("%s takes no pid", q.Op)
		}
	case OpState, OpRestoreThread, OpLock, OpCheckpoint, OpRestore, OpUnlock:
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
	for _, p := range q.Pairs {
		for _, uuid := range []string{p.Old, p.New} {
			if _, err := ParseUUID(uuid); err != nil {
				return err
			}
		}
	}
	return nil
}

// DecodeReply reads one reply.
func DecodeReply(b []byte) (Reply, error) {
	var r Reply
	if err := decode(b, &r); err != nil {
		return Reply{}, fmt.Errorf("decode reply: %w", err)
	}
	switch {
	case r.ID == 0:
		return Reply{}, errors.New("reply without id")
	case r.Fault != "" && r.Fault != FaultNoDriver && r.Fault != FaultTooOld && r.Fault != FaultInit:
		return Reply{}, fmt.Errorf("reply %d: unknown fault %q", r.ID, r.Fault)
	case r.Code < 0:
		return Reply{}, fmt.Errorf("reply %d: code %d is none", r.ID, r.Code)
	}
	return r, nil
}

// DecodeAnswer reads a Reply's Answer.
func DecodeAnswer(answer json.RawMessage, into any) error { return decode(answer, into) }

// Encode writes a message and refuses one that the other side would.
func Encode(message any) ([]byte, error) {
	b, err := json.Marshal(message)
	if err != nil {
		return nil, fmt.Errorf("encode message: %w", err)
	}
	if len(b) > MaxMessage {
		return nil, fmt.Errorf("message of %d bytes is longer than %d", len(b), MaxMessage)
	}
	return b, nil
}

func decode(b []byte, into any) error {
	if len(b) > MaxMessage {
		return fmt.Errorf("message is longer than %d bytes", MaxMessage)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if _, err := d.Token(); err != io.EOF {
		return errors.New("more than one value in a message")
	}
	return nil
}
