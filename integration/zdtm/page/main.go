// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Page writes docs/internals/zdtm.md out of the last results of CRIU's suite in docs/results. `make test-zdtm`
// runs it, and a test fails while the committed page is another.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/gpuckpt/gpuckpt/integration/zdtm"
)

func main() {
	page, err := page("..")
	if err == nil {
		err = os.WriteFile("../docs/internals/zdtm.md", []byte(page), 0o644)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "page:", err)
		os.Exit(1)
	}
}

// page makes the page; root is that of the repository.
func page(root string) (string, error) {
	results, from, err := last(root)
	return zdtm.Page(results, from), err
}

// last reads the last results, and returns the name of their directory.
func last(root string) (map[string]zdtm.Result, string, error) {
	logs, err := filepath.Glob(filepath.Join(root, "docs/results/*/zdtm.jsonl"))
	if err != nil || len(logs) == 0 {
		return nil, "", errors.Join(errors.New("docs/results has no zdtm.jsonl"), err)
	}
	path := slices.Max(logs) // their directories begin with the date
	file, err := os.Open(path)
	if err != nil {
		return nil, "", err
	}
	defer file.Close()
	results, err := zdtm.Read(file)
	return results, filepath.Base(filepath.Dir(path)), err
}
