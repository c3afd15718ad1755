// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"fmt"
	"os/exec"
	"syscall"
	"time"

	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
	"github.com/gpuckpt/gpuckpt/internal/node/worker"
)

// drainTimeout is how long the helper may go on without its client (package driver), and exit.
const drainTimeout = 2*time.Minute + 10*time.Second

// kind is what all helpers have in common.
var kind = worker.Kind{
	Name: "CUDA helper", Gone: ErrHelperGone, Hung: ErrHelperHung, Garbled: ErrHelperGarbled,
	MaxMessage: wire.MaxMessage, Drain: drainTimeout,
}

// Helper is a running gpuckpt-cuda-helper. It initialises the driver with its first call (45 to 520
// ms on real hardware) and answers any number of concurrent calls. Keep one for a whole operation.
//
// A call that exceeds its limit (Options) returns ErrHelperHung, and the helper is killed. Calls
// beside it, and those of a helper that dies, return ErrHelperGone. What such a call did to its
// process is unknown: ask State of a new Helper.
//
// A context that ends makes the call return at once. It goes on in the helper, because a driver
// call whose caller dies midway may leave the process out of step with the driver
// (checkpoint-restore/criu#2547). Later calls for the process wait for its end.
//
// The helper ends by itself when this end of its socket closes, at most 2 min later.
type Helper struct {
	opts   Options
	cmd    *exec.Cmd
	worker *worker.Worker
}

// Start starts a helper within ctx. The first call reports whether there is a driver.
func Start(ctx context.Context, opts Options) (*Helper, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("start CUDA helper: %w", err)
	}
	opts = opts.withDefaults()
	cmd, err := opts.command()
	if err != nil {
		return nil, err
	}
	// A process group of its own: Ctrl-C in a terminal must not end a driver call midway.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	w, err := worker.Start(kind, cmd, opts.Run)
	if err != nil {
		return nil, err
	}
	return &Helper{opts: opts, cmd: cmd, worker: w}, nil
}

// Alive reports whether the helper still answers, as far as is known without asking it.
func (h *Helper) Alive() bool { return h.worker.Alive() }

// Close ends the helper and reaps it. It waits 10 s for that, or 2 min while a call is under way
// whose context has ended, and then kills it. It may be called twice. Its error reports that the
// helper had to be killed or could not be reaped.
func (h *Helper) Close() error { return h.worker.Close() }
