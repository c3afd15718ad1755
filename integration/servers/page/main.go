// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Page writes docs/internals/servers.md out of the last results of servers in docs/results. `make test-servers`
// runs it, and a test fails while the committed page is another.
package main

import (
	"fmt"
	"os"

	"github.com/gpuckpt/gpuckpt/integration/beside"
	"github.com/gpuckpt/gpuckpt/integration/servers"
)

func main() {
	page, err := page("..")
	if err == nil {
		err = os.WriteFile("../docs/internals/servers.md", []byte(page), 0o644)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "page:", err)
		os.Exit(1)
	}
}

// page makes the page; root is that of the repository.
func page(root string) (string, error) {
	results, from, err := beside.Last(root, "servers.jsonl")
	return servers.Page(results, from), err
}
