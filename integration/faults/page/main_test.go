// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/faults"
)

// The committed page is what the table makes.
func TestPageIsCurrent(t *testing.T) {
	page, err := os.ReadFile("../../../docs/faults.md")
	if err != nil {
		t.Fatal(err)
	}
	if string(page) != faults.Page() {
		t.Error("docs/faults.md is not what the table makes: run make faults-page")
	}
}
