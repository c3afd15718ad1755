// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Page writes docs/internals/faults.md out of the table of faults and the log of the last walk. `make
// faults-page` runs it, and a test fails while the committed page is another.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/gpuckpt/gpuckpt/integration/faults"
)

func main() {
	page, err := page("..")
	if err == nil {
		err = os.WriteFile("../docs/internals/faults.md", []byte(page), 0o644)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "page:", err)
		os.Exit(1)
	}
}

// page makes the page out of the table and the last walk; root is that of the repository.
func page(root string) (string, error) {
	var walk []faults.Tried
	for _, path := range faults.WalkPaths {
		log, err := os.Open(filepath.Join(root, path))
		if err != nil {
			return "", err
		}
		some, err := faults.ReadWalk(log)
		log.Close()
		if err != nil {
			return "", err
		}
		walk = append(walk, some...)
	}
	return faults.Page(walk), nil
}
