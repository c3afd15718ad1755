// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/pflag"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/proc"
	"github.com/gpuckpt/gpuckpt/internal/version"
)

// This file is NVIDIA's cuda-checkpoint utility, version 580, as CRIU's CUDA
// plugin and existing scripts know it. NVIDIA's is closed; sources:
//   - options and help: its --help, in NVIDIA/cuda-checkpoint's README and
//     issues 18, 35 and 46;
//   - what CRIU passes and reads: checkpoint-restore/criu,
//     plugins/cuda/cuda_plugin.c;
//   - messages: NVIDIA/cuda-checkpoint issues 25, 35, 44 ("Error toggling CUDA
//     in process ID", "Could not restore on process ID"), criu#3040 ("Could not
//     find restore thread"), criu#2993 ("Error initializing CUDA"), and NVIDIA's
//     nvcf for "Error getting process state";
//   - exit status: "When cuda-checkpoint fails an operation it always returns
//     the positive CUDA error code" (criu#2540, by NVIDIA).
//
// Answers go to standard output, errors to standard error. --pid takes the id
// of a thread as well as of a process, as NVIDIA's does: CRIU asks for the state
// of the restore thread. Here the driver is given the process's id, since a step
// by a thread's id was seen to end a process (NVIDIA/cuda-checkpoint#41).

// checkpointHelp is short enough for CRIU, which looks for "--action" in its
// first 2047 bytes.
const checkpointHelp = `CUDA checkpoint and restore utility.
Version %s (gpuckpt).

Operations:
--get-state --pid <pid>
	Prints the current checkpoint state of the process specified by <pid>

--action lock | checkpoint | restore | unlock --pid <pid> [--timeout <ms>] [--device-map <uuids>]
	Performs the specified action on <pid>.
	For the lock action a timeout can be provided: how many milliseconds to wait for it to succeed.
	For the restore action a device map can be provided: oldUuid=newUuid,oldUuid=newUuid,...

--toggle --pid <pid>
	Toggles the CUDA state in the specified process between the running and checkpointed states

--get-restore-tid --pid <pid>
	Retrieves the CUDA restore thread ID of the process specified by <pid>

Options:
--pid|-p <pid>
	The pid upon which to perform the operation

--timeout|-t <timeout>
	Timeout for the lock action in milliseconds

--device-map|-d <deviceUuids>
	Maps old devices onto new ones during the restore action: oldUuid1=newUuid1,oldUuid2=newUuid2,...
	Must contain all checkpointed devices.

--help|-h
	Print this help message
`

// checkpointArgs is a command line of cuda-checkpoint.
type checkpointArgs struct {
	op      string // "get-state", "get-restore-tid", "toggle", or an action
	pid     int
	timeout time.Duration
	pairs   []cuda.Pair
	help    bool
}

// cudaCheckpoint runs as NVIDIA's utility and returns the exit status: 0, the
// driver's error code, or 1 for everything else.
func cudaCheckpoint(ctx context.Context, argv []string, stdout, stderr io.Writer) int {
	args, err := parseCheckpointArgs(argv)
	if err != nil {
		fmt.Fprintf(stderr, "%v\nTry 'cuda-checkpoint --help'\n", err)
		return 1
	}
	if args.help {
		fmt.Fprintf(stdout, checkpointHelp, version.Short())
		return 0
	}
	h, err := startHelper(ctx, cuda.Options{})
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 1
	}
	defer h.Close()
	answer, err := args.perform(ctx, h)
	if err != nil {
		fmt.Fprintln(stderr, args.message(err))
		return exitStatus(err)
	}
	fmt.Fprint(stdout, answer)
	return 0
}

func (a checkpointArgs) perform(ctx context.Context, h *cuda.Helper) (string, error) {
	a.pid = threadGroup(a.pid)
	switch a.op {
	case "get-state":
		s, err := h.State(ctx, a.pid)
		return s.String() + "\n", err
	case "get-restore-tid":
		tid, err := h.RestoreThread(ctx, a.pid)
		return strconv.Itoa(tid) + "\n", err
	case "toggle":
		_, err := cuda.Toggle(ctx, h, a.pid, a.timeout, a.pairs)
		return "", err
	case "lock":
		return "", h.Lock(ctx, a.pid, a.timeout)
	case "checkpoint":
		return "", h.Checkpoint(ctx, a.pid)
	case "restore":
		return "", h.Restore(ctx, a.pid, a.pairs)
	default:
		return "", h.Unlock(ctx, a.pid)
	}
}

// message words an error as NVIDIA's utility does where the driver refused, and
// in this project's words where something else is wrong.
func (a checkpointArgs) message(err error) string {
	var e *cuda.Error
	if !errors.As(err, &e) {
		return err.Error()
	}
	text := cmp.Or(e.Text, e.Result.Text())
	switch {
	case e.Op == "init":
		return fmt.Sprintf("Error initializing CUDA: \"%s\"", text)
	case a.op == "get-state":
		return fmt.Sprintf("Error getting process state for process ID %d: \"%s\"", a.pid, text)
	case a.op == "get-restore-tid":
		return fmt.Sprintf("Could not find restore thread for process ID %d", a.pid)
	case a.op == "toggle":
		return fmt.Sprintf("Error toggling CUDA in process ID %d: \"%s\"", a.pid, text)
	}
	return fmt.Sprintf("Could not %s on process ID %d: \"%s\"", a.op, a.pid, text)
}

// exitStatus is the driver's error code as far as a process can return it.
func exitStatus(err error) int {
	var e *cuda.Error
	if errors.As(err, &e) && e.Result&0xff != 0 {
		return int(e.Result & 0xff)
	}
	return 1
}

// parseCheckpointArgs reads options as getopt_long does: "--pid 1", "--pid=1",
// "-p 1" and "-p1", in any order.
func parseCheckpointArgs(argv []string) (a checkpointArgs, err error) {
	f := pflag.NewFlagSet("cuda-checkpoint", pflag.ContinueOnError)
	set := func(op string) error {
		if a.op != "" {
			return fmt.Errorf("more than one operation: %s and %s", a.op, op)
		}
		a.op = op
		return nil
	}
	for _, op := range []string{"get-state", "get-restore-tid", "toggle"} {
		f.BoolFunc(op, "", func(value string) error {
			if value != "true" {
				return errors.New("it takes no value")
			}
			return set(op)
		})
	}
	f.Func("action", "", func(action string) error {
		if !slices.Contains([]string{"lock", "checkpoint", "restore", "unlock"}, action) {
			return errors.New("unknown action")
		}
		return set(action)
	})
	f.FuncP("pid", "p", "", func(value string) (err error) {
		a.pid, err = parsePID(value)
		return err
	})
	f.FuncP("device-map", "d", "", func(value string) (err error) {
		a.pairs, err = cuda.ParsePairs(value)
		return err
	})
	ms := f.Uint32P("timeout", "t", 0, "") // of no effect but on locks
	f.BoolVarP(&a.help, "help", "h", false, "")
	err = f.Parse(argv)
	a.timeout = time.Duration(*ms) * time.Millisecond
	switch {
	case err != nil || a.help:
		return a, err
	case f.NArg() > 0:
		return a, fmt.Errorf("unknown option %q", f.Arg(0))
	case a.op == "":
		return a, errors.New("no operation given")
	case a.pid == 0:
		return a, errors.New("no pid given")
	case f.Changed("device-map") && a.op != "restore" && a.op != "toggle":
		return a, errors.New("a device map is for the restore action only")
	}
	return a, nil
}

// threadGroup returns the process of a thread, or the id itself if it is neither.
func threadGroup(tid int) int {
	status, _ := proc.StatusOf(tid)
	return cmp.Or(status.Process(), tid)
}
