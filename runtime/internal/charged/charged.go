// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package charged starts worker processes in the cgroup that staging memory is charged to.
package charged

import (
	"context"
	"fmt"
	"os"

	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/worker"
)

type process interface {
	Pid() int
	Close() error
}

// Start starts a worker process in the cgroup of the node. It is an error if that has a limit and cannot be used.
func Start[P process](ctx context.Context, run worker.Run, node config.Staging, start func(worker.Run, *os.File) (P, error)) (P, error) {
	if node.Cgroup == "" {
		return start(run, nil)
	}
	cg, err := host.MakeMemoryCgroup("/"+node.Cgroup, node.MemoryLimit)
	if err == nil {
		var p P
		if p, err = startIn(run, cg, start); err == nil {
			return p, nil
		}
	}
	if node.MemoryLimit > 0 { // no limit is not what was asked for
		var none P
		return none, fmt.Errorf("limit staging memory: %w", err)
	}
	log.G(ctx).WithError(err).Warn("staging memory is charged to containerd's cgroup")
	return start(run, nil)
}

func startIn[P process](run worker.Run, cg *host.MemoryCgroup, start func(worker.Run, *os.File) (P, error)) (p P, err error) {
	dir, err := cg.Open()
	if err != nil {
		return p, err
	}
	if dir != nil {
		defer dir.Close()
		if p, err := start(run, dir); err == nil {
			return p, nil
		}
		// A filter of system calls may know no clone3.
	}
	if p, err = start(run, nil); err != nil {
		return p, err
	}
	if err := cg.Add(p.Pid()); err != nil {
		p.Close()
		return p, err
	}
	return p, nil
}
