// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/beside"
	"github.com/gpuckpt/gpuckpt/integration/zdtm"
)

// The committed page is what the committed results make.
func TestPageIsCurrent(t *testing.T) {
	committed, err := os.ReadFile("../../../docs/internals/zdtm.md")
	if err != nil {
		t.Fatal(err)
	}
	made, err := page("../../..")
	if err != nil {
		t.Fatal(err)
	}
	if string(committed) != made {
		t.Error("docs/internals/zdtm.md is not what docs/results makes: run go -C integration run ./zdtm/page")
	}
}

// In the committed results what passes with runc's shim passes here, or is an exception.
func TestResults(t *testing.T) {
	results, _, err := beside.Last("../../..", "zdtm.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	if len(results) < 400 {
		t.Errorf("the results of %d tests: the suite has more", len(results))
	}
	for _, result := range results {
		if err := result.Judge(zdtm.Exceptions); err != nil {
			t.Errorf("%s: %v", result.Test, err)
		}
	}
}
