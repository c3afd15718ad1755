// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cudatool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
	"github.com/gpuckpt/gpuckpt/internal/node/version"
)

// This file is NVIDIA's cuda-checkpoint utility, version 580, as CRIU's CUDA plugin and existing
// scripts know it. NVIDIA's is closed; sources:
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

// Utility is NVIDIA's utility. Its exit status is 0, the driver's error code, or else 1.
func Utility(ctx context.Context, argv []string, stdout, stderr io.Writer) int {
	st, help, err := parseCheckpointArgs(argv)
	if err != nil {
		fmt.Fprintf(stderr, "%v\nTry 'cuda-checkpoint --help'\n", err)
		return 1
	}
	if help != "" {
		fmt.Fprint(stdout, help)
		return 0
	}
	h, err := startHelper(ctx, cuda.Options{})
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 1
	}
	defer h.Close()
	status, _ := proc.StatusOf(st.pid) // nothing of an id that is neither a process nor a thread
	st.pid = cmp.Or(status.Process(), st.pid)
	a, err := st.take(ctx, h)
	if err != nil {
		fmt.Fprintln(stderr, st.message(err))
		return exitStatus(err)
	}
	fmt.Fprint(stdout, a.text)
	return 0
}

// message words an error of the driver's as NVIDIA's utility does, any other as this project does.
func (s step) message(err error) string {
	var e *cuda.Error
	if !errors.As(err, &e) {
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
	var e *cuda.Error
	if errors.As(err, &e) && e.Result&0xff != 0 {
		return int(e.Result & 0xff)
	}
	return 1
}

// parseCheckpointArgs reads options as getopt_long does: "--pid 1", "--pid=1", "-p 1" and "-p1", in
// any order. help is not empty if asked for; CRIU looks for "--action" in its first 2047 bytes.
func parseCheckpointArgs(argv []string) (s step, help string, err error) {
	f := pflag.NewFlagSet("cuda-checkpoint", pflag.ContinueOnError)
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
	f.FuncP("pid", "p", "the process's `pid`", func(value string) (err error) {
		s.pid, err = parsePID(value)
		return err
	})
	ms := f.Uint32P("timeout", "t", 0, "of a lock, in `ms`")
	f.FuncP("device-map", "d", "`oldUuid=newUuid,...` for all GPUs of the checkpoint, of a restore", func(value string) (err error) {
		s.pairs, err = cuda.ParsePairs(value)
		return err
	})
	asked := f.BoolP("help", "h", false, "print this help message")
	if slices.ContainsFunc(argv, func(a string) bool { return a == "--launch-job" || strings.HasPrefix(a, "--launch-job=") }) {
		return s, "", errors.New("--launch-job is not supported: it starts jobs that share GPU memory; " +
			"run them in a container with the annotation dev.gpuckpt.interposer=true, or call NVIDIA's own cuda-checkpoint, of driver 590 or newer")
	}
	err = f.Parse(argv)
	s.timeout = time.Duration(*ms) * time.Millisecond
	switch {
	case err != nil:
	case *asked:
		help = fmt.Sprintf("CUDA checkpoint and restore utility.\nVersion %s (gpuckpt).\n\n%s", version.Short(), f.FlagUsages())
	case f.NArg() > 0:
		err = fmt.Errorf("unknown option %q", f.Arg(0))
	case s.op == "":
		err = errors.New("no operation given")
	case s.pid == 0:
		err = errors.New("no pid given")
	case f.Changed("device-map") && s.op != "restore" && s.op != "toggle":
		err = errors.New("a device map is for the restore action only")
	}
	return s, help, err
}
