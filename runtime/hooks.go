// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"context"
	"time"

	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/operation/sequence"
	"github.com/gpuckpt/gpuckpt/runtime/internal/hooks"
)

// program returns the container's program, which its hooks tell of checkpoints and restores.
func (s *Service) program(c *container) hooks.Program {
	return hooks.Container{Task: s.TTRPCTaskService, ID: c.id, Bundle: c.bundle}
}

// hears reports whether the program is told of checkpoints. The containers of a pod have its annotations
// alike, so there those are that use a GPU.
func (c *container) hears(gpu bool) bool {
	return gpu || c.annotations[annotations.CRISandboxID] == ""
}

// readHooks reads the hooks of a container, which take as long as the node lets them.
func (c *container) readHooks(read config.Source) (hooks.Hooks, error) {
	view, err := read()
	if err != nil {
		return hooks.Hooks{}, err
	}
	return hooks.Read(c.annotations, time.Duration(view.HookTimeout))
}

// tellBefore is that of pausing, outside of the node's turn: a hook may take minutes.
func (k *checkpointing) tellBefore(ctx context.Context) (uint64, error) {
	if k.told.BeforeCheckpoint == nil {
		return 0, nil
	}
	k.turn.Give()
	err := k.pausing.tellBefore(ctx)
	if err == nil {
		if err = k.turn.Take(ctx); err != nil {
			err = sequence.Join(err, k.tellAfter(context.WithoutCancel(ctx)))
		}
	}
	return 0, err
}

// tellAfter is that of pausing, outside of the node's turn. Beside it files may be written still, which
// end the turn then.
func (k *checkpointing) tellAfter(ctx context.Context) error {
	if k.told.AfterCheckpoint != nil && !k.beside {
		k.turn.Give()
	}
	return k.pausing.tellAfter(ctx)
}

// endTurn has the last of the steps, or the first that fails, end the node's turn.
func (k *checkpointing) endTurn(steps []sequence.Step) []sequence.Step {
	for i, st := range steps {
		steps[i].Do = func(ctx context.Context) (uint64, error) {
			bytes, err := st.Do(ctx)
			if err != nil || i == len(steps)-1 {
				k.turn.Give()
			}
			return bytes, err
		}
	}
	return steps
}

// tellBefore tells the program of a checkpoint that is to come. On an error the program has heard
// that it runs on.
func (p *pausing) tellBefore(ctx context.Context) error {
	err := p.told.BeforeCheckpoint.Tell(ctx, p.s.program(p.c))
	if err != nil {
		err = sequence.Join(err, p.tellAfter(context.WithoutCancel(ctx)))
	}
	return err
}

// tellAfter tells the program that it runs on.
func (p *pausing) tellAfter(ctx context.Context) error {
	if p.c.ended {
		return nil
	}
	return p.told.AfterCheckpoint.Tell(ctx, p.s.program(p.c))
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

func (k *restoring) tell(ctx context.Context) (uint64, error) {
	if k.told.AfterRestore != nil {
		k.turn.Give() // a hook may take minutes
	}
	return 0, k.told.AfterRestore.Tell(ctx, k.s.program(k.c))
}
