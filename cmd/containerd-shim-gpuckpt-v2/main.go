// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// containerd-shim-gpuckpt-v2 is a containerd runtime shim: runc's own, with
// the CUDA steps in its checkpoint, pause, resume and restore.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/gpuckpt/gpuckpt/cmd/containerd-shim-gpuckpt-v2/internal/bootstrap"
	"github.com/gpuckpt/gpuckpt/internal/criu/loopback"
	"github.com/gpuckpt/gpuckpt/internal/criu/pages"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/gpu/steer"
	"github.com/gpuckpt/gpuckpt/internal/node/version"
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
	if loopback.IsHook() {
		loopback.Main()
	}
	if version.Asked(os.Args) { // else containerd's package prints the version of containerd
		fmt.Println("containerd-shim-gpuckpt-v2", version.String())
		return
	}
	runtime.Register()
	bootstrap.Run(context.Background(), runtime.NewManager())
}
