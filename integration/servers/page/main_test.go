// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/beside"
	"github.com/gpuckpt/gpuckpt/integration/servers"
)

// The committed page is what the committed results make.
func TestPageIsCurrent(t *testing.T) {
	committed, err := os.ReadFile("../../../docs/internals/servers.md")
	if err != nil {
		t.Fatal(err)
	}
	made, err := page("../../..")
	if err != nil {
		t.Fatal(err)
	}
	if string(committed) != made {
		t.Error("docs/internals/servers.md is not what docs/results makes: run go -C integration run ./servers/page")
	}
}

// In the committed results at least thirty servers pass with runc's shim, and what does passes here.
func TestResults(t *testing.T) {
	results, _, err := beside.Last("../../..", "servers.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	passed := 0
	for _, result := range results {
		if err := result.Judge(servers.Exceptions); err != nil {
			t.Errorf("%s: %v", result.Test, err)
		}
		if result.Runc[beside.Place].Passed() && result.Runc[beside.Image].Passed() {
			passed++
		}
	}
	if passed < 30 {
		t.Errorf("%d servers pass with runc's shim on both ways: the table has more", passed)
	}
}
