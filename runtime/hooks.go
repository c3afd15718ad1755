// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"

	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/internal/operation/sequence"
	"github.com/gpuckpt/gpuckpt/runtime/internal/hooks"
)

// program returns the container's program, which its hooks tell of checkpoints and restores.
func program(s *Service, c *container) hooks.Program {
	return hooks.Container{Task: s.TTRPCTaskService, ID: c.id, Bundle: c.bundle}
}

// tellBefore tells the program of a checkpoint that is to come. On an error the program has heard
// that it runs on.
func (p *pausing) tellBefore(ctx context.Context) (uint64, error) {
	err := p.told.BeforeCheckpoint.Tell(ctx, program(p.s, p.c))
	if err != nil {
		err = sequence.Join(err, p.tellAfter(context.WithoutCancel(ctx)))
	}
	return 0, err
}

// tellAfter tells the program that it runs on.
func (p *pausing) tellAfter(ctx context.Context) error {
	if p.c.ended {
		return nil
	}
	return p.told.AfterCheckpoint.Tell(ctx, program(p.s, p.c))
}

// note writes into the container that it was restored. That it cannot be written is logged and no
// more: a program that looks for it finds an earlier one, or none.
func (k *restoring) note(ctx context.Context) (uint64, error) {
	note, err := hooks.WriteNote(k.c.pid, k.c.bundle)
	if err != nil {
		log.G(ctx).WithError(err).Warn("the file /run/gpuckpt/restored is not written")
		return 0, nil
	}
	log.G(ctx).WithFields(log.Fields{"restores": note.Restores, "restore": note.ID}).Info("restored")
	return 0, nil
}

// tell tells the program that it was restored.
func (k *restoring) tell(ctx context.Context) (uint64, error) {
	return 0, k.told.AfterRestore.Tell(ctx, program(k.s, k.c))
}
