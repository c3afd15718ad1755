// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cudahelper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/worker"
	"github.com/gpuckpt/gpuckpt/runtime/internal/charged"
)

// moverMemory is what a mover takes of the cgroup of GPU state beside the pages of files, in bytes: pinned memory of 32
// threads, 8 MiB each, and what CUDA has.
const moverMemory = 512 << 20

// Mover returns what starts a mover for GPUs, by their UUIDs, and waits until it is ready to copy memory of the first with
// all processors: see cuda.Mover.Ready. It may run beside all else, and goes by the node's settings of now. The pages of
// files that the mover makes are charged as GPU state is. It is an error if the cgroup has no room for the mover beside GPU
// state of so many bytes.
func (k *Helpers) Mover(gpus []string, state uint64) func(context.Context) (*cuda.Mover, error) {
	node, run := k.Node, k.Run
	return func(ctx context.Context) (*cuda.Mover, error) { return startMover(ctx, node, run, gpus, state) }
}

func startMover(ctx context.Context, node config.Node, run Run, gpus []string, state uint64) (*cuda.Mover, error) {
	cgroup := ""
	if node.Staging.Cgroup != "" {
		cgroup = "/" + node.Staging.Cgroup
	}
	if room := host.Headroom(cgroup); room < state+moverMemory {
		return nil, fmt.Errorf("a mover needs %d bytes beside %d of GPU state, and the cgroup of [staging] has room for %d: %w", uint64(moverMemory), state, room, unix.ENOMEM)
	}
	m, err := charged.Start(ctx, run, node.Staging, func(run worker.Run, cgroup *os.File) (*cuda.Mover, error) {
		opts, err := place(node, cuda.Options{Visible: gpus})
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

// Pace has a mover copy out on a quarter of the processors if calm. That is for a program that stands still until the
// driver and CRIU are done, and does not wait for the mover: beside copies on all processors these took 1.1 s, and 0.85 s
// beside slow ones (H200, 16 GiB). It runs no kernels, since the program's, which may be on the GPU by then, could not be
// interrupted for them.
func Pace(m *cuda.Mover, calm bool) *Mover {
	if calm {
		return &Mover{m, max(1, runtime.NumCPU()/4), false}
	}
	return &Mover{m, 0, true}
}

// Mover is a cuda.Mover with a pace.
type Mover struct {
	*cuda.Mover
	threads int
	digest  bool
}

// CopyOut is cuda.Mover's, to the beginning of the file.
func (m *Mover) CopyOut(ctx context.Context, memory []cuda.Memory, to *os.File) (cuda.Parts, error) {
	return m.Mover.CopyOut(ctx, memory, to, 0, m.threads, m.digest)
}

// RoomTwice reports whether each GPU has as much free as is in use there, by UUID: processes that go on need not wait
// for a mover.
func RoomTwice(ctx context.Context, helper *cuda.Helper, use map[string]uint64) bool {
	info, err := helper.InfoNow(ctx)
	return err == nil && use != nil && !slices.ContainsFunc(info.GPUs, func(g cuda.GPU) bool {
		return g.Free < use[g.UUID] || g.Free == 0
	})
}
