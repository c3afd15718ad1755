// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// containerd-shim-gpuckpt-v2 is a containerd runtime shim: runc's own, with
// the CUDA steps in its checkpoint, pause, resume and restore.
package main

import (
	"context"

	"github.com/gpuckpt/gpuckpt/runtime"
	"github.com/gpuckpt/gpuckpt/trace"
)

func main() {
	if trace.IsTracer() {
		trace.Main()
	}
	if runtime.IsLoopbackHook() {
		runtime.LoopbackHook()
	}
	runtime.Register()
	runtime.Run(context.Background(), runtime.NewManager())
}
