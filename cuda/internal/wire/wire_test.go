// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"reflect"
	"strings"
	"testing"
)

const (
	uuidA = "GPU-5af7c0da-0000-4000-8000-00000000000a"
	uuidB = "GPU-5af7c0da-0000-4000-8000-00000000000b"
)

func TestRequestsArriveAsSent(t *testing.T) {
	for _, q := range []Request{
		{ID: 1, Op: OpInfo},
		{ID: 9, Op: OpInfo, Fresh: true},
		{ID: 10, Op: OpInfo, Early: true},
		{ID: 2, Op: OpState, PID: 1},
		{ID: 3, Op: OpRestoreThread, PID: 4194304},
		{ID: 4, Op: OpLock, PID: 7, TimeoutMS: 10000},
		{ID: 5, Op: OpLock, PID: 7},
		{ID: 6, Op: OpCheckpoint, PID: 7},
		{ID: 7, Op: OpRestore, PID: 7, Pairs: []Pair{{uuidA, uuidB}, {uuidB, uuidA}}},
		{ID: 8, Op: OpUnlock, PID: 7},
	} {
		b, err := Encode(q)
		if err != nil {
			t.Fatal(err)
		}
		got, err := DecodeRequest(b)
		if err != nil {
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
		"unknown operation":  `{"id":1,"op":"kill","pid":1}`,
		"unknown field":      `{"id":1,"op":"state","pid":1,"force":true}`,
		"no id":              `{"op":"state","pid":1}`,
		"no pid":             `{"id":1,"op":"state"}`,
		"negative pid":       `{"id":1,"op":"state","pid":-1}`,
		"pid over 31 bits":   `{"id":1,"op":"state","pid":2147483648}`,
		"pid for info":       `{"id":1,"op":"info","pid":1}`,
		"fresh state":        `{"id":1,"op":"state","pid":1,"fresh":true}`,
		"early state":        `{"id":1,"op":"state","pid":1,"early":true}`,
		"timeout for unlock": `{"id":1,"op":"unlock","pid":1,"timeout_ms":5}`,
		"negative timeout":   `{"id":1,"op":"lock","pid":1,"timeout_ms":-5}`,
		"timeout over 49 d":  `{"id":1,"op":"lock","pid":1,"timeout_ms":4294967296}`,
		"pairs for lock":     `{"id":1,"op":"lock","pid":1,"pairs":[{"old":"` + uuidA + `","new":"` + uuidB + `"}]}`,
		"pair of no UUIDs":   `{"id":1,"op":"restore","pid":1,"pairs":[{"old":"0","new":"1"}]}`,
		"two values":         `{"id":1,"op":"state","pid":1}{"id":2,"op":"state","pid":1}`,
		"rubbish behind":     `{"id":1,"op":"state","pid":1} x`,
		"too long":           `{"id":1,"op":"state","pid":1}` + strings.Repeat(" ", MaxMessage),
	} {
		if q, err := DecodeRequest([]byte(s)); err == nil {
			t.Errorf("%s: accepted as %+v", name, q)
		}
	}
}

func TestRepliesThatAreRefused(t *testing.T) {
	for name, s := range map[string]string{
		"no id":         `{"code":0}`,
		"unknown fault": `{"id":1,"code":0,"fault":"tired"}`,
		"unknown field": `{"id":1,"code":0,"took":3}`,
		"negative code": `{"id":1,"code":-1}`,
		"not JSON":      "\x00\x01",
	} {
		if r, err := DecodeReply([]byte(s)); err == nil {
			t.Errorf("%s: accepted as %+v", name, r)
		}
	}
}

func TestEncodeRefusesWhatWouldNotArrive(t *testing.T) {
	if _, err := Encode(Reply{ID: 1, Text: strings.Repeat("x", MaxMessage)}); err == nil {
		t.Error("a message longer than MaxMessage was encoded")
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

// Whatever DecodeRequest accepts must be carried out exactly as it reads: it
// encodes to a message that decodes to the same request.
func FuzzDecodeRequest(f *testing.F) {
	f.Add([]byte(`{"id":1,"op":"info"}`))
	f.Add([]byte(`{"id":9,"op":"lock","pid":12,"timeout_ms":100}`))
	f.Add([]byte(`{"id":7,"op":"restore","pid":7,"pairs":[{"old":"` + uuidA + `","new":"` + uuidB + `"}]}`))
	f.Add([]byte(`{"id":1,"op":"state","pid":1} {}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		q, err := DecodeRequest(b)
		if err != nil {
			return
		}
		again, err := Encode(q)
		if err != nil {
			t.Fatalf("%+v does not encode: %v", q, err)
		}
		back, err := DecodeRequest(again)
		if err != nil {
			t.Fatalf("%s is refused: %v", again, err)
		}
		if len(q.Pairs) == 0 {
			q.Pairs = nil // "pairs":[] and none are the same
		}
		if !reflect.DeepEqual(q, back) {
			t.Fatalf("%+v became %+v", q, back)
		}
	})
}
