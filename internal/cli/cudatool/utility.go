// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cudatool takes single processes off their GPUs and back, by pid, with the options of NVIDIA's
// cuda-checkpoint: as "gpuckpt cuda", and under the name cuda-checkpoint.
//
// The life of a step: it is read from the command line, a helper that has loaded the driver takes it,
// and the process's state is printed if that was asked for.
//
// The options are those of version 580, as CRIU's CUDA plugin and existing scripts know it. NVIDIA's is
// closed; sources:
//   - options: its --help, in NVIDIA/cuda-checkpoint's README and issues 18, 35 and 46;
//   - what CRIU passes and reads: checkpoint-restore/criu, plugins/cuda/cuda_plugin.c;
//   - messages: NVIDIA/cuda-checkpoint issues 25, 35, 44 ("Error toggling CUDA in process ID",
//     "Could not restore on process ID"), criu#3040 ("Could not find restore thread"), criu#2993
//     ("Error initializing CUDA"), and NVIDIA's nvcf for "Error getting process state";
//   - exit status: "When cuda-checkpoint fails an operation it always returns the positive CUDA
//     error code" (criu#2540, by NVIDIA).
//
// --pid takes the id of a thread as well as of a process, as NVIDIA's does: CRIU asks for the state
// of the restore thread. Here the driver is given the process's id, since a step by a thread's id
// was seen to end a process (NVIDIA/cuda-checkpoint#41).
package cudatool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/driverroot"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
	"github.com/gpuckpt/gpuckpt/internal/node/version"
)

// step is what is done with one process.
type step struct {
	op      string // "state", "restore-tid", "toggle", "lock", "checkpoint", "restore" or "unlock"
	pid     int
	timeout time.Duration // of a lock
	pairs   []cuda.Pair   // of a restore
}

// flags has a command line set the step. CRIU looks for "--action" in the first 2047 bytes of the help.
func (s *step) flags(f *pflag.FlagSet) {
	set := func(op string) error {
		if s.op != "" {
			return fmt.Errorf("more than one operation: %s and %s", s.op, op)
		}
		s.op = op
		return nil
	}
	for flag, usage := range map[string]string{
		"get-state":       "print the checkpoint state of the process",
		"get-restore-tid": "print the process's CUDA restore thread",
		"toggle":          "take the process from running to checkpointed, or back",
	} {
		f.BoolFunc(flag, usage, func(value string) error {
			if value != "true" {
				return errors.New("it takes no value")
			}
			return set(strings.TrimPrefix(flag, "get-"))
		})
	}
	f.Func("action", "`what` to do with the process: lock, checkpoint, restore or unlock", func(action string) error {
		if !slices.Contains([]string{"lock", "checkpoint", "restore", "unlock"}, action) {
			return errors.New("unknown action")
		}
		return set(action)
	})
	f.FuncP("pid", "p", "the process's `pid`", func(value string) error {
		pid, err := strconv.ParseInt(value, 10, 32)
		if err != nil || pid <= 0 {
			return errors.New("it is not a pid")
		}
		s.pid = int(pid)
		return nil
	})
	f.FuncP("timeout", "t", "of a lock, in `ms`; without it, or with 0, the lock waits for the process's GPU work for ever", func(value string) error {
		ms, err := strconv.ParseUint(value, 10, 32)
		s.timeout = time.Duration(ms) * time.Millisecond
		return err
	})
	f.FuncP("device-map", "d", "`oldUuid=newUuid,...` for all GPUs of the checkpoint, of a restore", func(value string) (err error) {
		s.pairs, err = cuda.ParsePairs(value)
		return err
	})
}

// check refuses a command line that says too little, or too much.
func (s *step) check(rest []string) error {
	switch {
	case len(rest) > 0:
		return fmt.Errorf("unknown option %q", rest[0])
	case s.op == "":
		return errors.New("no operation given")
	case s.pid == 0:
		return errors.New("no pid given")
	case s.pairs != nil && s.op != "restore" && s.op != "toggle":
		return errors.New("a device map is for the restore action only")
	}
	return nil
}

// take takes the step with a helper of its own, which loads the driver that FindDriver finds, and returns
// what is printed of it.
func (s *step) take(ctx context.Context, join int) (text string, err error) {
	place, err := FindDriver()
	if err != nil {
		return "", err
	}
	h, err := cuda.Start(ctx, cuda.Options{Join: join, LibraryDir: place.Dir})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	pid := s.pid
	if join == 0 {
		status, _ := proc.StatusOf(pid) // nothing of an id that is neither a process nor a thread
		pid = cmp.Or(status.Process(), pid)
	}
	switch s.op {
	case "state":
		state, err := h.State(ctx, pid)
		return fmt.Sprintln(state), err
	case "restore-tid":
		thread, err := h.RestoreThread(ctx, pid)
		return fmt.Sprintln(thread), err
	case "toggle":
		_, err = cuda.Toggle(ctx, h, pid, s.timeout, s.pairs)
	case "lock":
		err = h.Lock(ctx, pid, s.timeout)
	case "checkpoint":
		err = h.Checkpoint(ctx, pid)
	case "restore":
		err = h.Restore(ctx, pid, s.pairs)
	default:
		err = h.Unlock(ctx, pid)
	}
	return "", err
}

// FindDriver finds the driver as a shim does.
func FindDriver() (driverroot.Place, error) {
	node, err := config.Load()
	if err != nil {
		return driverroot.Place{}, err
	}
	return driverroot.Find(node.DriverRoot, os.Getenv("LD_LIBRARY_PATH"), node.CDISpecDirs)
}

// Command is "gpuckpt cuda": its errors are this project's, and it can act inside of a container.
func Command() *cobra.Command {
	var s step
	var join int
	c := &cobra.Command{
		Use:   "cuda",
		Short: "Take single processes off their GPUs and back, by pid",
		Long: `Take single processes off their GPUs and back, by pid, with the options of NVIDIA's cuda-checkpoint.

A process is running, locked or checkpointed:

  running --lock--> locked --checkpoint--> checkpointed --restore--> locked --unlock--> running`,
		Example: `  gpuckpt cuda --get-state --pid 4711
  gpuckpt cuda --action restore --pid 4711`,
		Args: func(_ *cobra.Command, rest []string) error { return s.check(rest) },
		RunE: func(cmd *cobra.Command, _ []string) error {
			text, err := s.take(cmd.Context(), join)
			if err != nil {
				return err
			}
			_, err = io.WriteString(cmd.OutOrStdout(), text)
			return err
		},
	}
	s.flags(c.Flags())
	c.Flags().IntVar(&join, "join", 0, "act from inside the mount and pid namespaces of this pid; --pid then counts there")
	return c
}

// Utility is the program under NVIDIA's name. Its exit status is 0, the driver's error code, or else 1.
func Utility(ctx context.Context, argv []string, stdout, stderr io.Writer) int {
	s, help, err := parseCheckpointArgs(argv)
	if err != nil {
		fmt.Fprintf(stderr, "%v\nTry 'cuda-checkpoint --help'\n", err)
		return 1
	}
	if help != "" {
		fmt.Fprint(stdout, help)
		return 0
	}
	text, err := s.take(ctx, 0)
	if err != nil {
		fmt.Fprintln(stderr, s.message(err))
		return exitStatus(err)
	}
	fmt.Fprint(stdout, text)
	return 0
}

// message words an error of the driver's as NVIDIA's utility does, any other as this project does.
func (s *step) message(err error) string {
	e, ok := errors.AsType[*cuda.Error](err)
	if !ok {
		return err.Error()
	}
	text := cmp.Or(e.Text, e.Result.Text())
	switch {
	case e.Op == "init":
		return fmt.Sprintf("Error initializing CUDA: \"%s\"", text)
	case s.op == "state":
		return fmt.Sprintf("Error getting process state for process ID %d: \"%s\"", s.pid, text)
	case s.op == "restore-tid":
		return fmt.Sprintf("Could not find restore thread for process ID %d", s.pid)
	case s.op == "toggle":
		return fmt.Sprintf("Error toggling CUDA in process ID %d: \"%s\"", s.pid, text)
	}
	return fmt.Sprintf("Could not %s on process ID %d: \"%s\"", s.op, s.pid, text)
}

// exitStatus is the driver's error code as far as a process can return it.
func exitStatus(err error) int {
	if e, ok := errors.AsType[*cuda.Error](err); ok && e.Result&0xff != 0 {
		return int(e.Result & 0xff)
	}
	return 1
}

// parseCheckpointArgs reads options as getopt_long does: "--pid 1", "--pid=1", "-p 1" and "-p1", in
// any order. help is not empty if asked for.
func parseCheckpointArgs(argv []string) (s step, help string, err error) {
	if slices.ContainsFunc(argv, func(a string) bool { return a == "--launch-job" || strings.HasPrefix(a, "--launch-job=") }) {
		return s, "", errors.New("--launch-job is not supported: it starts jobs that share GPU memory; " +
			"run them in a container with the annotation dev.gpuckpt.interposer=true, or call NVIDIA's own cuda-checkpoint, of driver 590 or newer")
	}
	f := pflag.NewFlagSet("cuda-checkpoint", pflag.ContinueOnError)
	s.flags(f)
	asked := f.BoolP("help", "h", false, "print this help message")
	if err := f.Parse(argv); err != nil {
		return s, "", err
	}
	if *asked {
		return s, fmt.Sprintf("CUDA checkpoint and restore utility.\nVersion %s (gpuckpt).\n\n%s", version.Short(), f.FlagUsages()), nil
	}
	return s, "", s.check(f.Args())
}
