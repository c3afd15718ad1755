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
	if err := c.Halt(ctx, syscall.SIGTERM); err != nil {
		return err
	}
	return c.StartAgain(ctx)
}

// Halt ends the daemon alone, by a signal. Containers live on, and no method may be used before
// StartAgain but Stop, and those that ask a container by its port.
func (c *Containerd) Halt(ctx context.Context, signal syscall.Signal) error {
	if err := errors.Join(c.client.Close(), c.daemon.Process.Signal(signal)); err != nil {
		return fmt.Errorf("end containerd: %w", err)
	}
	select {
	case <-c.exited:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("end containerd: %w", context.Cause(ctx))
	}
}

// StartAgain starts a daemon that Halt has ended.
func (c *Containerd) StartAgain(ctx context.Context) error {
	program, err := c.opts.Bins.Path("containerd")
	if err != nil {
		return err
	}
	c.exited = make(chan struct{})
	if err := c.startDaemon(program); err != nil {
		return err
	}
	return c.connect(ctx)
}

// ConfigPath is the daemon's configuration file.
func (c *Containerd) ConfigPath() string { return c.home.config() }
