// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"io"
	"runtime/debug"
	"testing"

	"github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/containerd/v2/pkg/shutdown"
	"github.com/containerd/go-runc"
)

// A shim collects garbage less often than containerd's package has it, and has a limit all the same.
func TestCollectLess(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(40))
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(-1))
	defer func(m runc.ProcessMonitor) { runc.Monitor = m }(runc.Monitor)
	ctx, down := shutdown.WithShutdown(t.Context())
	defer down.Shutdown()
	if _, err := newService(ctx, struct {
		events.Publisher
		io.Closer
	}{nil, io.NopCloser(nil)}, down); err != nil {
		t.Fatal(err)
	}
	if percent, most := debug.SetGCPercent(-1), debug.SetMemoryLimit(-1); percent <= 40 || most > 64<<20 {
		t.Errorf("GOGC is %d, and the limit %d", percent, most)
	}
}
