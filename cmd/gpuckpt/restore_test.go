// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

func TestLayerSize(t *testing.T) {
	for text, want := range map[string]uint64{"64MiB": 64 << 20, "1GiB": 1 << 30, "1G": 1 << 30, "128mib": 128 << 20, "67108864": 64 << 20} {
		got, err := (&buildFlags{compression: "none", layer: text}).options()
		if err != nil || got.LayerBytes != want {
			t.Errorf("%s: got %d, %v", text, got.LayerBytes, err)
		}
	}
	for _, bad := range []string{"x", "1X", "-1", "99999999999999999999GiB", "18446744073709551615KiB", "65MiB"} {
		if got, err := (&buildFlags{compression: "none", layer: bad}).options(); err == nil {
			t.Errorf("%q was read as %d", bad, got.LayerBytes)
		}
	}
}

// What a container may do is named as "ctr run" has it.
func TestGrants(t *testing.T) {
	for _, o := range []restoreOptions{{capAdd: []string{"SYS_ADMIN"}}, {capDrop: []string{"ALL"}}, {files: "many"}, {files: "4096:1024"}} {
		if _, err := o.grants(); err == nil {
			t.Errorf("granted: %+v", o)
		}
	}
	o := restoreOptions{capAdd: []string{"CAP_SYS_ADMIN"}, files: "1024:4096"}
	if _, err := o.grants(); err != nil {
		t.Error(err)
	}
}

func TestDedupLines(t *testing.T) {
	if got := dedupLines("push it: not found\nnot found\nleft behind\nnot found"); got != "push it: not found\nleft behind" {
		t.Errorf("got %q", got)
	}
	if got := dedupLines("it is suspended: failed precondition: failed precondition\nfailed precondition\nleft behind"); got != "it is suspended\nleft behind" {
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
