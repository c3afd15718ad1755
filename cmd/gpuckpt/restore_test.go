// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"reflect"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

func TestParseMount(t *testing.T) {
	got, err := parseMount("type=bind,src=/a,dst=/b,options=rbind:ro")
	if want := (specs.Mount{Type: "bind", Source: "/a", Destination: "/b", Options: []string{"rbind", "ro"}}); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v", got, err)
	}
	for _, bad := range []string{"", "type=bind", "dst=/b,owner=me"} {
		if _, err := parseMount(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]uint64{"64MiB": 64 << 20, "1GiB": 1 << 30, "4096": 4096, "1KiB": 1024} {
		if got, err := parseSize(text); err != nil || got != want {
			t.Errorf("%s: got %d, %v", text, got, err)
		}
	}
	for _, bad := range []string{"", "1TB", "-1", "99999999999999999999GiB", "18446744073709551615KiB"} {
		if got, err := parseSize(bad); err == nil {
			t.Errorf("%q was read as %d", bad, got)
		}
	}
	for bytes, want := range map[uint64]string{0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 64 << 20: "64.0 MiB", 5 << 40: "5.0 TiB", 1 << 62: "4194304.0 TiB"} {
		if got := size(bytes); got != want {
			t.Errorf("%d: got %q, want %q", bytes, got, want)
		}
	}
}

func TestDedupLines(t *testing.T) {
	if got := dedupLines("push it: not found\nnot found\nleft behind\nnot found"); got != "push it: not found\nleft behind" {
		t.Errorf("got %q", got)
	}
}

func TestNewName(t *testing.T) {
	for ref, want := range map[string]string{"example.com:5000/team/job:1": "job-", "example.com/job@sha256:abc": "job-"} {
		if got := newName(ref); !strings.HasPrefix(got, want) || len(got) != len(want)+8 {
			t.Errorf("%s: got %q", ref, got)
		}
	}
}
