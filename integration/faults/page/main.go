// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Page writes docs/faults.md out of the table of faults. `make faults-page` runs it, and a test fails
// while the committed page is another.
package main

import (
	"fmt"
	"os"

	"github.com/gpuckpt/gpuckpt/integration/faults"
)

func main() {
	if err := os.WriteFile("../docs/faults.md", []byte(faults.Page()), 0o644); err != nil {
		fmt.Fprintln(os.Stderr, "page:", err)
		os.Exit(1)
	}
}
