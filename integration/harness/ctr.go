// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"time"
)

// CtrError is a ctr command that failed.
type CtrError struct {
	// Args are ctr's arguments, without address and namespace.
	Args []string
	// ExitCode is ctr's; -1 when it was killed.
	ExitCode int
	// Output is what it wrote, standard error last.
	Output string
}

// Error gives the command and what it wrote.
func (e *CtrError) Error() string {
	return fmt.Sprintf("ctr %s: exit code %d: %s", strings.Join(e.Args, " "), e.ExitCode, strings.TrimSpace(e.Output))
}

// Output is what a program left behind.
type Output struct {
	Stdout, Stderr string
	ExitCode       int
}

// Ctr runs the ctr program on the instance, in its namespace, and returns what
// it wrote to standard output. A failure of ctr itself is a *CtrError.
func (c *Containerd) Ctr(ctx context.Context, args ...string) (string, error) {
	out, err := c.runCtr(ctx, nil, args)
	if err == nil && out.ExitCode != 0 {
		err = &CtrError{Args: args, ExitCode: out.ExitCode, Output: out.Stdout + out.Stderr}
	}
	return out.Stdout, err
}

// runCtr runs ctr to its end; stdin nil is an empty one. Its exit code alone is
// no error. A read of stdin may still wait when runCtr returns.
func (c *Containerd) runCtr(ctx context.Context, stdin io.Reader, args []string) (Output, error) {
	program, err := c.opts.Bins.Path("ctr")
	if err != nil {
		return Output{}, err
	}
	c.opts.Logf("ctr %s", strings.Join(args, " "))
	cmd := exec.CommandContext(ctx, program, append([]string{"--address", c.Address(), "--namespace", c.Namespace()}, args...)...)
	cmd.Env = []string{
		"PATH=" + c.opts.Bins.SearchPath(),
		"HOME=" + c.home.dir,
		"TMPDIR=" + c.home.temp(),
		envHome + "=" + c.home.dir,
		// Else ctr's standard error is not the container's alone.
		"CONTAINERD_SUPPRESS_DEPRECATION_WARNINGS=true",
	}
	cmd.Dir = c.home.dir
	if stdin != nil {
		pipe, err := cmd.StdinPipe()
		if err != nil {
			return Output{}, fmt.Errorf("ctr %s: %w", strings.Join(args, " "), err)
		}
		go func() {
			_, _ = io.Copy(pipe, stdin) // fails once ctr has ended
			_ = pipe.Close()
		}()
	}
	cmd.WaitDelay = 5 * time.Second // for pipes that something else still holds
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err = cmd.Run()
	out := Output{Stdout: stdout.String(), Stderr: stderr.String(), ExitCode: cmd.ProcessState.ExitCode()}
	if ctx.Err() != nil {
		return out, fmt.Errorf("ctr %s: %w: %s", strings.Join(args, " "), context.Cause(ctx), strings.TrimSpace(out.Stderr))
	}
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		return out, fmt.Errorf("ctr %s: %w", strings.Join(args, " "), err)
	}
	return out, nil
}

// Exec runs a program in the container with "ctr tasks exec", and returns what it wrote to standard output. A
// status other than 0 is a *CtrError.
func (k *Container) Exec(ctx context.Context, args ...string) (string, error) {
	id := fmt.Sprint("exec-", time.Now().UnixNano())
	return k.c.Ctr(ctx, append([]string{"tasks", "exec", "--fifo-dir", k.c.home.fifos(), "--exec-id", id, k.ID}, args...)...)
}
