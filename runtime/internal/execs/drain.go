// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package execs

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Container is what Drain needs to know of a container. host.Cgroup has Pids.
type Container struct {
	Init int // the pid of its first process
	Pids func() ([]int, error)
}

func (c Container) has(pid int) bool {
	pids, err := c.Pids()
	return err == nil && slices.Contains(pids, pid)
}

// Options are those of a Drain.
type Options struct {
	// Wait bounds the wait for processes that are at work.
	Wait time.Duration
	// EndShells has processes with a terminal ended. Without it they are refused.
	EndShells bool
}

// hangUp is how long a shell has to end after SIGHUP. After that it is killed.
const hangUp = time.Second

// Drain waits until no exec'd process is in the container, nor on its way in: a probe ends by
// itself. The gate must be closed. The error names the processes that are left: those with a
// terminal at once, all others when Wait is over.
func (g *Gate) Drain(ctx context.Context, c Container, opts Options) error {
	began := time.Now()
	look := time.NewTicker(10 * time.Millisecond)
	defer look.Stop()
	asked := make(map[int]bool) // to hang up
	for {
		onTheirWay := g.onTheirWay() // before the look: one that arrives is seen in it
		found, err := find(c)
		if err != nil {
			return err
		}
		if len(found.shells)+len(found.others)+onTheirWay == 0 {
			return nil
		}
		took := time.Since(began)
		switch {
		case len(found.shells) > 0 && !opts.EndShells, took >= opts.Wait:
			if err := found.refuse(); err != nil {
				return err
			}
			return g.RefuseStarting()
		}
		for _, pid := range found.shells {
			switch {
			case took >= hangUp:
				_ = proc.Signal(pid, unix.SIGKILL, c.has) // or it has ended
			case !asked[pid]:
				_ = proc.Signal(pid, unix.SIGHUP, c.has)
				asked[pid] = true
			}
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for exec'd processes to end: %w", context.Cause(ctx))
		}
	}
}

// Refuse returns an error that names the exec'd processes of a container, nil if there are none.
func Refuse(c Container) error {
	found, err := find(c)
	if err != nil {
		return err
	}
	return found.refuse()
}

// processes are exec'd processes of a container, those with a terminal apart.
type processes struct{ shells, others []int }

func find(c Container) (processes, error) {
	var found processes
	pids, err := c.Pids()
	if err != nil {
		return found, err
	}
	execed, err := proc.NotBelow(c.Init, pids)
	if err != nil {
		return found, err
	}
	for _, pid := range execed {
		terminal, err := proc.HasTerminal(pid)
		switch {
		case proc.Ended(err):
		case err != nil:
			return found, err
		case terminal:
			found.shells = append(found.shells, pid)
		default:
			found.others = append(found.others, pid)
		}
	}
	return found, nil
}

func (p processes) refuse() error {
	describe := func(pids []int) string {
		var names []string
		for _, pid := range pids {
			names = append(names, proc.Describe(pid))
		}
		return strings.Join(names, ", ")
	}
	switch {
	case len(p.shells) > 0:
		return fmt.Errorf("processes were exec'd into the container with a terminal and would be missing from the checkpoint: %s; leave the shell and try again, or have checkpoints end it, by shells = %q in %s: %w",
			describe(p.shells), config.End, config.Path, errdefs.ErrFailedPrecondition)
	case len(p.others) > 0:
		return fmt.Errorf("processes were exec'd into the container and would be missing from the checkpoint: %s; end them and try again: %w",
			describe(p.others), errdefs.ErrFailedPrecondition)
	}
	return nil
}
