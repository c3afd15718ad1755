// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// containerd-shim-gpuckpt-v2 is a containerd runtime shim: runc's own, with
// the CUDA steps in its checkpoint, pause, resume and restore.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/gpuckpt/gpuckpt/internal/bootstrap"
	"github.com/gpuckpt/gpuckpt/internal/host"
	"github.com/gpuckpt/gpuckpt/internal/pages"
	"github.com/gpuckpt/gpuckpt/internal/staging"
	"github.com/gpuckpt/gpuckpt/internal/steer"
	"github.com/gpuckpt/gpuckpt/internal/version"
	"github.com/gpuckpt/gpuckpt/runtime"
)

func main() {
	if steer.IsTracer() {
		steer.Main()
	}
	if staging.IsDigester() {
		staging.DigesterMain()
	}
	if pages.IsWorker() {
		pages.Main()
	}
	if host.IsLoopbackHook() {
		host.LoopbackHook()
	}
	if version.Asked(os.Args) { // else containerd's package prints the version of containerd
		fmt.Println("containerd-shim-gpuckpt-v2", version.String())
		return
	}
	runtime.Register()
	bootstrap.Run(context.Background(), runtime.NewManager())
}
