// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Command gpuckpt-cuda-helper calls NVIDIA's driver on behalf of gpuckpt and
// its containerd shim. It is started by package cuda, never by hand.
package main

import (
	"fmt"
	"os"

	"github.com/gpuckpt/gpuckpt/cuda/driver"
	"github.com/gpuckpt/gpuckpt/internal/node/version"
)

func main() {
	if version.Asked(os.Args) {
		fmt.Println("gpuckpt-cuda-helper", version.String())
		return
	}
	if err := driver.Serve(); err != nil {
		fmt.Fprintf(os.Stderr, "gpuckpt-cuda-helper: %v\n", err)
		os.Exit(1)
	}
}
