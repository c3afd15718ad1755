// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/cuda"
)

// cudaCall is one call of a sub-command of "gpuckpt cuda": its flags, and what it does
// them with.
type cudaCall struct {
	helper    string
	join      int
	json      bool
	timeout   uint32 // milliseconds
	deviceMap string
	*cuda.Helper
	pid   int
	pairs []cuda.Pair
}

// cudaAnswer is what a sub-command prints, as JSON if asked. A step prints no text.
type cudaAnswer struct {
	PID           int         `json:"pid"`
	State         *cuda.State `json:"state,omitempty"`
	RestoreThread int         `json:"restore_thread,omitempty"`
	text          string
}

func cudaCommand() *cobra.Command {
	var o cudaCall
	withTimeout := func(c *cobra.Command) *cobra.Command {
		c.Flags().Uint32Var(&o.timeout, "timeout", 0, "milliseconds to wait for the process's GPU work to end (0: forever)")
		return c
	}
	withMap := func(c *cobra.Command) *cobra.Command {
		c.Flags().StringVar(&o.deviceMap, "device-map", "", "OLD=NEW,… UUIDs: restore onto other GPUs, naming every GPU of the checkpoint")
		return c
	}
	lockTimeout := func() time.Duration { return time.Duration(o.timeout) * time.Millisecond }
	c := group(&cobra.Command{
		Use:   "cuda",
		Short: "Take single processes off their GPUs and back, by pid",
		Long: `Take single processes off their GPUs and back, by pid.

A process is running, locked or checkpointed:

  running --lock--> locked --checkpoint--> checkpointed --restore--> locked --unlock--> running`,
	},
		o.command("state", "Print the state of a process", func(ctx context.Context) (cudaAnswer, error) {
			s, err := o.State(ctx, o.pid)
			return cudaAnswer{State: &s, text: s.String() + "\n"}, err
		}),
		o.command("restore-tid", "Print the thread of a process that serves the driver", func(ctx context.Context) (cudaAnswer, error) {
			tid, err := o.RestoreThread(ctx, o.pid)
			return cudaAnswer{RestoreThread: tid, text: strconv.Itoa(tid) + "\n"}, err
		}),
		withTimeout(o.step("lock", "Block the CUDA calls of a process and wait for its GPU work", func(ctx context.Context) (cuda.State, error) {
			return cuda.Locked, o.Lock(ctx, o.pid, lockTimeout())
		})),
		o.step("checkpoint", "Take the GPU memory of a locked process into host memory", func(ctx context.Context) (cuda.State, error) {
			return cuda.Checkpointed, o.Checkpoint(ctx, o.pid)
		}),
		withMap(o.step("restore", "Return its GPU memory to a checkpointed process", func(ctx context.Context) (cuda.State, error) {
			return cuda.Locked, o.Restore(ctx, o.pid, o.pairs)
		})),
		o.step("unlock", "Let a locked process run on", func(ctx context.Context) (cuda.State, error) {
			return cuda.Running, o.Unlock(ctx, o.pid)
		}),
		withMap(withTimeout(o.step("toggle", "Checkpoint a running process, or return a checkpointed one to running", func(ctx context.Context) (cuda.State, error) {
			return cuda.Toggle(ctx, o.Helper, o.pid, lockTimeout(), o.pairs)
		}))),
	)
	f := c.PersistentFlags()
	f.StringVar(&o.helper, "helper", "", "path of "+cuda.HelperName+" (default: beside this program, then in $PATH)")
	f.IntVar(&o.join, "join", 0, "act from inside the mount and pid namespaces of this pid; PID then counts there")
	f.BoolVar(&o.json, "json", false, "print JSON")
	_ = c.MarkPersistentFlagFilename("helper")
	return c
}

// step makes a sub-command that takes a process to the state which it returns.
func (o *cudaCall) step(name, short string, do func(context.Context) (cuda.State, error)) *cobra.Command {
	return o.command(name, short, func(ctx context.Context) (cudaAnswer, error) {
		s, err := do(ctx)
		return cudaAnswer{State: &s}, err
	})
}

// command makes one sub-command, which runs do with a helper of its own.
func (o *cudaCall) command(name, short string, do func(context.Context) (cudaAnswer, error)) *cobra.Command {
	return &cobra.Command{
		Use:   name + " PID",
		Short: short,
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if o.pid, err = parsePID(args[0]); err != nil {
				return err
			}
			if o.pairs, err = cuda.ParsePairs(o.deviceMap); err != nil {
				return err
			}
			if o.Helper, err = startHelper(cmd.Context(), cuda.Options{Path: o.helper, Join: o.join}); err != nil {
				return err
			}
			defer joinClose(&err, o.Helper)
			answer, err := do(cmd.Context())
			if err != nil {
				return err
			}
			answer.PID = o.pid
			if o.json {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(answer)
			}
			_, err = io.WriteString(cmd.OutOrStdout(), answer.text)
			return err
		},
	}
}

func parsePID(s string) (int, error) {
	pid, err := strconv.ParseInt(s, 10, 32)
	if err != nil || pid <= 0 {
		return 0, fmt.Errorf("%q is not a pid", s)
	}
	return int(pid), nil
}
