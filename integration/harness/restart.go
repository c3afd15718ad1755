// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"fmt"
	"syscall"
)

// Restart ends the daemon as systemd does, with SIGTERM to it alone, and starts it again with the
// configuration that it then has. Containers live on. No other method may be in use meanwhile.
func (c *Containerd) Restart(ctx context.Context) error {
	program, err := c.opts.Bins.Path("containerd")
	if err != nil {
		return err
	}
	if err := errors.Join(c.client.Close(), c.daemon.Process.Signal(syscall.SIGTERM)); err != nil {
		return fmt.Errorf("end containerd: %w", err)
	}
	select {
	case <-c.exited:
	case <-ctx.Done():
		return fmt.Errorf("end containerd: %w", context.Cause(ctx))
	}
	c.exited = make(chan struct{})
	if err := c.startDaemon(program); err != nil {
		return err
	}
	return c.connect(ctx)
}

// ConfigPath is the daemon's configuration file.
func (c *Containerd) ConfigPath() string { return c.home.config() }
