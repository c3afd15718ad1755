// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"github.com/gpuckpt/gpuckpt/internal/gpustate"
	"github.com/gpuckpt/gpuckpt/internal/host"
)

// target is what the GPU state of a container may do to the container.
type target struct{ c *container }

func (t target) Init() int { return t.c.pid }

func (t target) Cgroup() (gpustate.Cgroup, error) { return host.CgroupOf(t.c.pid) }

func (t target) CloseExecs() (reopen func()) { return t.c.execs.close() }

func (t target) RefuseStartingExecs() error { return t.c.execs.refuseStarting() }
