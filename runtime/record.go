// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"fmt"

	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/operation/journal"
	"github.com/gpuckpt/gpuckpt/internal/recovery"
	"github.com/gpuckpt/gpuckpt/runtime/internal/gpustate"
)

// begin writes the record of an operation, when what dead shims have left is out of its way.
func (c *container) begin(ctx context.Context, read config.Source, rec journal.Record) error {
	view, err := read()
	if err != nil {
		return err
	}
	recovery.Sweep(ctx, view.Node, c.namespace)
	rec.Namespace, rec.Container, rec.Bundle, rec.Spill = c.namespace, c.id, c.bundle, c.spillDir()
	if err := recovery.Identify(&rec, c.pid); err != nil {
		return fmt.Errorf("write the record of the %s: %w", rec.Operation, err)
	}
	return c.journal.Write(view.StateDir, rec)
}

// beginAnyway is begin for what is done with or without a record.
func (c *container) beginAnyway(ctx context.Context, read config.Source, operation string) {
	if err := c.begin(ctx, read, journal.Record{Operation: operation}); err != nil {
		log.G(ctx).WithError(err).Warn("no record is kept for a crash")
	}
}

// end removes the record of an operation that is over, or notes in it how the container stays.
// stuck is the error of a way back that has failed.
func (c *container) end(ctx context.Context, stuck error) {
	state := ""
	switch {
	case c.ended:
	case stuck != nil:
		state = journal.Stuck
	case c.suspended:
		state = journal.Suspended
	case c.paused:
		state = journal.Paused
	}
	c.gpu.Stuck = state == journal.Stuck && c.gpu.Phase() != gpustate.Unlocked // or a later undo has succeeded
	c.journal.End(ctx, state, stuck)
}
