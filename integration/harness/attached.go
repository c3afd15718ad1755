// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"fmt"
	"io"
)

// RunAttached runs a container to its end with ctr in the foreground, and
// returns what the program wrote and its exit code; stdin nil is an empty one.
// The container is removed.
func (c *Containerd) RunAttached(ctx context.Context, spec RunSpec, stdin io.Reader) (_ Output, err error) {
	k, err := c.Create(ctx, spec)
	if err != nil {
		return Output{}, err
	}
	defer func() { err = errors.Join(err, k.Remove(context.WithoutCancel(ctx))) }()

	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	if stdin != nil {
		started, failed := c.client.Subscribe(inner, fmt.Sprintf("topic==%q,event.container_id==%q", "/tasks/start", k.ID))
		stdin = io.MultiReader(stdin, lateEOF(func() {
			select {
			case <-started:
			case err := <-failed:
				if inner.Err() == nil {
					c.opts.Logf("wait for the start of %s: %v", k.ID, err)
				}
			case <-inner.Done():
			}
		}))
	}
	return c.runCtr(ctx, stdin, []string{"tasks", "start", "--fifo-dir", c.home.fifos(), spec.ID})
}

// lateEOF is an empty input that ends when the function returns. ctr closes a
// container's input when its own ends, but forgets to if that happens before the
// task is made (cmd/ctr/commands/tasks: stdinCloser has no closer yet), and the
// container then waits for ever.
type lateEOF func()

// Read never returns data.
func (wait lateEOF) Read([]byte) (int, error) {
	wait()
	return 0, io.EOF
}
