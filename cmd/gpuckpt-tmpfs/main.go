// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Command gpuckpt-tmpfs takes the place of the tar that CRIU runs for each tmpfs of a container, and brings
// the loopback interface of a restored one up, with the sysctls of its network. It is started by CRIU and runc, never by hand.
package main

import (
	"fmt"
	"os"

	"github.com/gpuckpt/gpuckpt/internal/criu/loopback"
	"github.com/gpuckpt/gpuckpt/internal/criu/tmpfs"
	"github.com/gpuckpt/gpuckpt/internal/node/version"
)

func main() {
	if version.Asked(os.Args) {
		fmt.Println(tmpfs.ProgramName, version.String())
		return
	}
	if loopback.IsHook() {
		loopback.Main()
	}
	tmpfs.Main()
}
