// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/cuda"
)

// cudaOptions are the flags that all of "gpuckpt cuda" have.
type cudaOptions struct {
	helper string
	join   int
	json   bool
}

// cudaAnswer is what a sub-command prints, as JSON if asked.
type cudaAnswer struct {
	PID           int         `json:"pid"`
	State         *cuda.State `json:"state,omitempty"`
	RestoreThread int         `json:"restore_thread,omitempty"`
	text          string
}

func cudaCommand() *cobra.Command {
	var o cudaOptions
	group := &cobra.Command{
		Use:   "cuda",
		Short: "Take single processes off their GPUs and back, by pid",
		Long: `Take single processes off their GPUs and back, by pid.

A process is running, locked or checkpointed:

  running --lock--> locked --checkpoint--> checkpointed --restore--> locked --unlock--> running`,
		Args: cobra.NoArgs, // so that an unknown sub-command is an error
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	group.PersistentFlags().StringVar(&o.helper, "helper", "", "path of "+cuda.HelperName+" (default: beside this program, then in $PATH)")
	group.PersistentFlags().IntVar(&o.join, "join", 0, "act from inside the mount and pid namespaces of this pid; PID then counts there")
	group.PersistentFlags().BoolVar(&o.json, "json", false, "print JSON")

	_ = group.MarkPersistentFlagFilename("helper")

	var timeout uint32
	var deviceMap string
	withTimeout := func(c *cobra.Command) *cobra.Command {
		c.Flags().Uint32Var(&timeout, "timeout", 0, "milliseconds to wait for the process's GPU work to end (0: forever)")
		return c
	}
	withMap := func(c *cobra.Command) *cobra.Command {
		c.Flags().StringVar(&deviceMap, "device-map", "", "OLD=NEW,… UUIDs: restore onto other GPUs, naming every GPU of the checkpoint")
		return c
	}
	lockTimeout := func() time.Duration { return time.Duration(timeout) * time.Millisecond }

	group.AddCommand(
		o.command("state", "Print the state of a process", func(ctx context.Context, h *cuda.Helper, pid int) (cudaAnswer, error) {
			s, err := h.State(ctx, pid)
			return cudaAnswer{State: &s, text: s.String()}, err
		}),
		o.command("restore-tid", "Print the thread of a process that serves the driver", func(ctx context.Context, h *cuda.Helper, pid int) (cudaAnswer, error) {
			tid, err := h.RestoreThread(ctx, pid)
			return cudaAnswer{RestoreThread: tid, text: strconv.Itoa(tid)}, err
		}),
		withTimeout(o.command("lock", "Block the CUDA calls of a process and wait for its GPU work", func(ctx context.Context, h *cuda.Helper, pid int) (cudaAnswer, error) {
			return reached(cuda.Locked, h.Lock(ctx, pid, lockTimeout()))
		})),
		o.command("checkpoint", "Take the GPU memory of a locked process into host memory", func(ctx context.Context, h *cuda.Helper, pid int) (cudaAnswer, error) {
			return reached(cuda.Checkpointed, h.Checkpoint(ctx, pid))
		}),
		withMap(o.command("restore", "Return its GPU memory to a checkpointed process", func(ctx context.Context, h *cuda.Helper, pid int) (cudaAnswer, error) {
			pairs, err := cuda.ParsePairs(deviceMap)
			if err != nil {
				return cudaAnswer{}, err
			}
			return reached(cuda.Locked, h.Restore(ctx, pid, pairs))
		})),
		o.command("unlock", "Let a locked process run on", func(ctx context.Context, h *cuda.Helper, pid int) (cudaAnswer, error) {
			return reached(cuda.Running, h.Unlock(ctx, pid))
		}),
		withMap(withTimeout(o.command("toggle", "Checkpoint a running process, or return a checkpointed one to running", func(ctx context.Context, h *cuda.Helper, pid int) (cudaAnswer, error) {
			pairs, err := cuda.ParsePairs(deviceMap)
			if err != nil {
				return cudaAnswer{}, err
			}
			s, err := cuda.Toggle(ctx, h, pid, lockTimeout(), pairs)
			return reached(s, err)
		}))),
	)
	return group
}

// reached answers a step: nothing in words, the new state in JSON.
func reached(s cuda.State, err error) (cudaAnswer, error) {
	return cudaAnswer{State: &s}, err
}

// command makes one sub-command, which runs do with a helper of its own.
func (o *cudaOptions) command(name, short string, do func(context.Context, *cuda.Helper, int) (cudaAnswer, error)) *cobra.Command {
	return &cobra.Command{
		Use:   name + " PID",
		Short: short,
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			pid, err := parsePID(args[0])
			if err != nil {
				return err
			}
			h, err := cuda.Start(cmd.Context(), cuda.Options{Path: o.helper, Join: o.join})
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, h.Close()) }()
			answer, err := do(cmd.Context(), h, pid)
			if err != nil {
				return err
			}
			answer.PID = pid
			return answer.print(cmd.OutOrStdout(), o.json)
		},
	}
}

func (a cudaAnswer) print(w io.Writer, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(w).Encode(a)
	}
	if a.text == "" {
		return nil
	}
	_, err := fmt.Fprintln(w, a.text)
	return err
}

func parsePID(s string) (int, error) {
	pid, err := strconv.ParseInt(s, 10, 32)
	if err != nil || pid <= 0 {
		return 0, fmt.Errorf("%q is not a pid", s)
	}
	return int(pid), nil
}
