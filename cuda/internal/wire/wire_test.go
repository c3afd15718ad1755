// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/internal/node/worker"
)

const (
	uuidA = "GPU-5af7c0da-0000-4000-8000-00000000000a"
	uuidB = "GPU-5af7c0da-0000-4000-8000-00000000000b"
)

func TestRequestsArriveAsSent(t *testing.T) {
	for _, q := range []Request{
		{Op: OpInfo},
		{Op: OpInfo, Fresh: true},
		{Op: OpInfo, Early: true},
		{Op: OpState, PID: 1},
		{Op: OpRestoreThread, PID: 4194304},
		{Op: OpLock, PID: 7, TimeoutMS: 10000},
		{Op: OpLock, PID: 7},
		{Op: OpCheckpoint, PID: 7},
		{Op: OpRestore, PID: 7, Pairs: []Pair{{uuidA, uuidB}, {uuidB, uuidA}}},
		{Op: OpUnlock, PID: 7},
		{Op: OpMemoryOn, PID: 7, Minors: []int{0, 3}},
		{Op: OpReaches, PID: 7},
		{Op: OpReady, GPU: uuidA, Threads: 4},
		{Op: OpCopyOut, Threads: 2, Pieces: []uint64{2 << 20, 4 << 20}, Offset: 4096},
		{Op: OpCopyOut, Pieces: []uint64{2 << 20}, NoKernel: true},
		{Op: OpCopyIn, GPU: uuidA, Pieces: []uint64{2 << 20}, Spans: []Span{{File: 1, Offset: 4096, Bytes: 4096}, {File: -1, Bytes: 2<<20 - 4096}}},
	} {
		b, err := json.Marshal(q)
		if err != nil {
			t.Fatal(err)
		}
		var got Request
		if err := worker.Decode(b, &got); err != nil {
			t.Errorf("%s: %v", b, err)
		} else if !reflect.DeepEqual(got, q) {
			t.Errorf("sent %+v, arrived %+v", q, got)
		}
	}
}

func TestRequestsThatAreRefused(t *testing.T) {
	for name, s := range map[string]string{
		"empty":              ``,
		"not JSON":           `state 1`,
		"unknown operation":  `{"op":"kill","pid":1}`,
		"unknown field":      `{"op":"state","pid":1,"force":true}`,
		"no pid":             `{"op":"state"}`,
		"negative pid":       `{"op":"state","pid":-1}`,
		"pid over 31 bits":   `{"op":"state","pid":2147483648}`,
		"negative timeout":   `{"op":"lock","pid":1,"timeout_ms":-5}`,
		"timeout over 49 d":  `{"op":"lock","pid":1,"timeout_ms":4294967296}`,
		"pair of no UUIDs":   `{"op":"restore","pid":1,"pairs":[{"old":"0","new":"1"}]}`,
		"negative minor":     `{"op":"imported","pid":1,"minors":[-1]}`,
		"33 minors":          `{"op":"imported","pid":1,"minors":[` + strings.Repeat("0,", 32) + `0]}`,
		"no threads":         `{"op":"copy-out","pieces":[1],"threads":-1}`,
		"ready on no GPU":    `{"op":"ready"}`,
		"copy-in to no GPU":  `{"op":"copy-in","gpu":"0"}`,
		"a piece of nothing": `{"op":"copy-out","pieces":[0]}`,
		"a piece too large":  `{"op":"copy-out","pieces":[9223372036854775807]}`,
		"65 pieces":          `{"op":"copy-out","pieces":[` + strings.Repeat("1,", 64) + `1]}`,
		"a span too short":   `{"op":"copy-in","gpu":"` + uuidA + `","pieces":[2],"spans":[{"file":0,"bytes":1}]}`,
		"a file before all":  `{"op":"copy-in","gpu":"` + uuidA + `","pieces":[1],"spans":[{"file":-2,"bytes":1}]}`,
		"two values":         `{"op":"state","pid":1}{"op":"state","pid":1}`,
		"rubbish behind":     `{"op":"state","pid":1} x`,
	} {
		var q Request
		if err := worker.Decode([]byte(s), &q); err == nil {
			t.Errorf("%s: accepted as %+v", name, q)
		}
	}
}

func TestRepliesThatAreRefused(t *testing.T) {
	for name, s := range map[string]string{
		"unknown fault": `{"code":0,"fault":"tired"}`,
		"unknown field": `{"code":0,"took":3}`,
		"negative code": `{"code":-1}`,
		"not JSON":      "\x00\x01",
	} {
		var r Reply
		if err := worker.Decode([]byte(s), &r); err == nil {
			t.Errorf("%s: accepted as %+v", name, r)
		}
	}
}

func TestUUID(t *testing.T) {
	id, err := ParseUUID(uuidA)
	if err != nil {
		t.Fatal(err)
	}
	if got := FormatUUID(id); got != uuidA {
		t.Errorf("%s came back as %s", uuidA, got)
	}
	if upper, err := ParseUUID("5AF7C0DA-0000-4000-8000-00000000000A"); err != nil || upper != id {
		t.Errorf("without prefix, in upper case: %v, %v", upper, err)
	}
	for _, bad := range []string{"", "GPU-", "0", "MIG-5af7c0da-0000-4000-8000-00000000000a",
		"GPU-5af7c0da000040008000-00000000000a", "GPU-5af7c0da-0000-4000-8000-00000000000g", uuidA + "0"} {
		if _, err := ParseUUID(bad); err == nil {
			t.Errorf("%q was taken for a UUID", bad)
		}
	}
}

// Whatever is accepted encodes to a message that decodes to the same request.
func FuzzDecodeRequest(f *testing.F) {
	f.Add([]byte(`{"op":"info"}`))
	f.Add([]byte(`{"op":"lock","pid":12,"timeout_ms":100}`))
	f.Add([]byte(`{"op":"restore","pid":7,"pairs":[{"old":"` + uuidA + `","new":"` + uuidB + `"}]}`))
	f.Add([]byte(`{"op":"state","pid":1} {}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var q, back Request
		if err := worker.Decode(b, &q); err != nil {
			return
		}
		again, err := json.Marshal(q)
		if err != nil {
			t.Fatalf("%+v does not encode: %v", q, err)
		}
		if err := worker.Decode(again, &back); err != nil {
			t.Fatalf("%s is refused: %v", again, err)
		}
		if len(q.Pairs) == 0 {
			q.Pairs = nil // "pairs":[] and none are the same
		}
		if len(q.Minors) == 0 {
			q.Minors = nil
		}
		if len(q.Pieces) == 0 {
			q.Pieces = nil
		}
		if len(q.Spans) == 0 {
			q.Spans = nil
		}
		if !reflect.DeepEqual(q, back) {
			t.Fatalf("%+v became %+v", q, back)
		}
	})
}
