// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cudatool takes single processes off their GPUs and back, by pid: "gpuckpt cuda", and the
// program under the name and with the options of NVIDIA's cuda-checkpoint.
//
// The life of a step: it is read from the command line, a helper that has loaded the driver takes it,
// and the process's new state is printed.
package cudatool

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

// step is what "gpuckpt cuda" and cuda-checkpoint do with one process.
type step struct {
	op      string // "state", "restore-tid", "toggle", "lock", "checkpoint", "restore" or "unlock"
	pid     int
	timeout time.Duration // of a lock
	pairs   []cuda.Pair   // of a restore
}

// answer is what came of a step, and what is printed of it without --json.
type answer struct {
	PID           int         `json:"pid"`
	State         *cuda.State `json:"state,omitempty"`
	RestoreThread int         `json:"restore_thread,omitempty"`
	text          string
}

func (s step) take(ctx context.Context, h *cuda.Helper) (answer, error) {
	a := answer{PID: s.pid, State: new(cuda.State)}
	var err error
	switch s.op {
	case "state":
		*a.State, err = h.State(ctx, s.pid)
		a.text = a.State.String() + "\n"
	case "restore-tid":
		a.State = nil
		a.RestoreThread, err = h.RestoreThread(ctx, s.pid)
		a.text = strconv.Itoa(a.RestoreThread) + "\n"
	case "toggle":
		*a.State, err = cuda.Toggle(ctx, h, s.pid, s.timeout, s.pairs)
	case "lock":
		*a.State, err = cuda.Locked, h.Lock(ctx, s.pid, s.timeout)
	case "checkpoint":
		*a.State, err = cuda.Checkpointed, h.Checkpoint(ctx, s.pid)
	case "restore":
		*a.State, err = cuda.Locked, h.Restore(ctx, s.pid, s.pairs)
	default:
		*a.State, err = cuda.Running, h.Unlock(ctx, s.pid)
	}
	return a, err
}

type flags struct {
	helper    string
	join      int
	json      bool
	timeout   uint32 // milliseconds
	deviceMap string
}

// Command is "gpuckpt cuda".
func Command() *cobra.Command {
	var o flags
	c := &cobra.Command{
		Use:   "cuda",
		Short: "Take single processes off their GPUs and back, by pid",
		Long: `Take single processes off their GPUs and back, by pid.

A process is running, locked or checkpointed:

  running --lock--> locked --checkpoint--> checkpointed --restore--> locked --unlock--> running`,
		Args: cobra.NoArgs, // so that an unknown sub-command is an error
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	for _, sub := range []struct {
		op, short      string
		timeout, remap bool
	}{
		{op: "state", short: "Print the state of a process"},
		{op: "restore-tid", short: "Print the thread of a process that serves the driver"},
		{op: "lock", short: "Block the CUDA calls of a process and wait for its GPU work", timeout: true},
		{op: "checkpoint", short: "Take the GPU memory of a locked process into host memory"},
		{op: "restore", short: "Return its GPU memory to a checkpointed process", remap: true},
		{op: "unlock", short: "Let a locked process run on"},
		{op: "toggle", short: "Checkpoint a running process, or return a checkpointed one to running", timeout: true, remap: true},
	} {
		sc := &cobra.Command{
			Use:   sub.op + " PID",
			Short: sub.short,
			Args:  cobra.ExactArgs(1),
			RunE:  func(cmd *cobra.Command, args []string) error { return o.take(cmd, sub.op, args[0]) },
		}
		if sub.timeout {
			sc.Flags().Uint32Var(&o.timeout, "timeout", 0, "milliseconds to wait for the process's GPU work to end (0: forever)")
		}
		if sub.remap {
			sc.Flags().StringVar(&o.deviceMap, "device-map", "", "OLD=NEW,… UUIDs: restore onto other GPUs, naming every GPU of the checkpoint")
		}
		c.AddCommand(sc)
	}
	f := c.PersistentFlags()
	f.StringVar(&o.helper, "helper", "", "path of "+cuda.HelperName+" (default: next to this program, then in $PATH)")
	f.IntVar(&o.join, "join", 0, "act from inside the mount and pid namespaces of this pid; PID then counts there")
	f.BoolVar(&o.json, "json", false, "print JSON")
	_ = c.MarkPersistentFlagFilename("helper")
	return c
}

// take takes one step with a helper of its own, and prints the answer.
func (o *flags) take(cmd *cobra.Command, op, pid string) (err error) {
	s := step{op: op, timeout: time.Duration(o.timeout) * time.Millisecond}
	if s.pid, err = parsePID(pid); err != nil {
		return err
	}
	if s.pairs, err = cuda.ParsePairs(o.deviceMap); err != nil {
		return err
	}
	h, err := startHelper(cmd.Context(), cuda.Options{Path: o.helper, Join: o.join})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	a, err := s.take(cmd.Context(), h)
	if err != nil {
		return err
	}
	if o.json {
		return json.NewEncoder(cmd.OutOrStdout()).Encode(a)
	}
	_, err = io.WriteString(cmd.OutOrStdout(), a.text)
	return err
}

func parsePID(s string) (int, error) {
	pid, err := strconv.ParseInt(s, 10, 32)
	if err != nil || pid <= 0 {
		return 0, fmt.Errorf("%q is not a pid", s)
	}
	return int(pid), nil
}
