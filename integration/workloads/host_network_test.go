// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package workloads

import (
	"context"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/workloads/programs"
)

// Ranks on the host's network are ended and restored at once, three times: their connections to each
// other are open again, at the ports that they had, some of which are in TIME_WAIT for a minute.
func TestHostNetworkAtOnce(t *testing.T) {
	for _, name := range []string{"ddp", "fsdp2-shm", "fsdp2-sockets"} {
		t.Run(name, func(t *testing.T) {
			result := results.Add(t)
			p := programs.Named(name)
			if p.Alone {
				needsGPUs(t)
			} else {
				needsPyTorch(t)
			}
			p.Connected = false // to the host's network, that is
			takeRoom(t, gpuOf(p), p.Host)
			ctx, cancel := context.WithTimeout(t.Context(), limitOf(p))
			defer cancel()
			compare(ctx, t, result, travel, true, p)
			wantGPUState(t, result)
		})
	}
}
