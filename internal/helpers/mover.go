// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package helpers

import (
	"context"
	"errors"
	"os"
	"os/exec"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/charged"
	"github.com/gpuckpt/gpuckpt/internal/worker"
)

// Mover starts a mover for GPUs, by their UUIDs, and waits until it is ready to copy memory of the first with all
// processors: see cuda.Mover.Ready. The pages of files that it makes are charged as GPU state is.
func (k *Helpers) Mover(ctx context.Context, gpus []string) (*cuda.Mover, error) {
	m, err := charged.Start(ctx, k.Run, k.Node.Staging, func(run worker.Run, cgroup *os.File) (*cuda.Mover, error) {
		opts, err := k.place(cuda.Options{Visible: gpus})
		if err != nil {
			return nil, err
		}
		opts.Run = func(cmd *exec.Cmd) (func() (int, error), error) {
			if cgroup != nil {
				cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(cgroup.Fd())
			}
			return run(cmd)
		}
		return cuda.StartMover(ctx, opts)
	})
	if err != nil {
		return nil, err
	}
	if len(gpus) > 0 {
		if err := m.Ready(ctx, gpus[0], 0); err != nil {
			m.Kill()
			return nil, errors.Join(err, m.Close())
		}
	}
	return m, nil
}
