// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
)

// Command is a program out of Bins to be run beside the instance: a client, or a
// daemon such as the kubelet. It has the daemon's environment, and ends with the
// instance at the latest. It is in a process group of its own, so that Ctrl-C at
// a terminal reaches the tests alone.
//
// The error says that there is no such program.
func (c *Containerd) Command(ctx context.Context, program string, args ...string) (*exec.Cmd, error) {
	path, err := c.opts.Bins.Path(program)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Dir = c.home.dir
	cmd.Env = c.daemonEnv()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd, nil
}

// Output runs a client to its end and returns what it wrote to standard output.
// What it wrote to standard error is in the error when it fails.
func (c *Containerd) Output(ctx context.Context, program string, args ...string) (string, error) {
	return c.OutputEnv(ctx, nil, program, args...)
}

// OutputEnv is Output with further variables, KEY=value each.
func (c *Containerd) OutputEnv(ctx context.Context, env []string, program string, args ...string) (string, error) {
	cmd, err := c.Command(ctx, program, args...)
	if err != nil {
		return "", err
	}
	cmd.Env = append(cmd.Env, env...)
	return c.output(cmd, program, args)
}

// output runs a command to its end, which is called so in logs and errors.
func (c *Containerd) output(cmd *exec.Cmd, program string, args []string) (string, error) {
	c.opts.Logf("%s %s", program, strings.Join(args, " "))
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s %s: %w: %s", program, strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}
