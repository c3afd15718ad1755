// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"testing"
)

// The committed page is what the table makes.
func TestPageIsCurrent(t *testing.T) {
	committed, err := os.ReadFile("../../../docs/internals/faults.md")
	if err != nil {
		t.Fatal(err)
	}
	made, err := page("../../..")
	if err != nil {
		t.Fatal(err)
	}
	if string(committed) != made {
		t.Error("docs/internals/faults.md is not what the table makes: run make faults-page")
	}
}
