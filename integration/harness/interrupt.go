// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"os/signal"
	"syscall"
)

// Interruptible calls run with a context that ends on Ctrl-C (SIGINT), SIGTERM
// and SIGHUP, and returns what run returns. Instances started with that context
// stop then, so that what waits for them fails; run must still call their Stop,
// which returns once all is cleaned up. A second signal ends the program at once.
func Interruptible(run func(context.Context) int) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	context.AfterFunc(ctx, stop)
	return run(ctx)
}
