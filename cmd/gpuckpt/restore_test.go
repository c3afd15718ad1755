// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

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
