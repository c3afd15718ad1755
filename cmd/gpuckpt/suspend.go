// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/localstore"
	"github.com/gpuckpt/gpuckpt/internal/cli/pods"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

func suspendCommand() *cobra.Command {
	var spill string
	c := orderCommand(&cobra.Command{
		Use:   "suspend CONTAINER | --pod POD [CONTAINER...]",
		Short: "Take a container off its GPUs, in place",
		Long: `Take a container off its GPUs, in place.

Its GPU memory goes to host memory, or with --spill to a disk, and its processes
stay, frozen, until "gpuckpt resume" or "ctr tasks resume". Others can use the
GPUs meanwhile.`,
		Example: `  gpuckpt suspend job
  gpuckpt suspend --spill /var/spill job`,
	}, client.Paused, func() (map[string]string, error) {
		orders := map[string]string{annotations.Suspend: "true"}
		if spill == "" {
			return orders, nil
		}
		dir, err := filepath.Abs(spill) // the shim has another working directory
		orders[annotations.SuspendSpill] = dir
		return orders, err
	})
	c.Flags().StringVar(&spill, "spill", "", "write the GPU state to this directory on a disk, so that it takes no memory")
	_ = c.MarkFlagDirname("spill")
	return c
}

func resumeCommand() *cobra.Command {
	var gpus []string
	c := orderCommand(&cobra.Command{
		Use:   "resume CONTAINER | --pod POD [CONTAINER...]",
		Short: "Return a suspended container to its GPUs, or to others",
		Long: `Return a suspended container to its GPUs, or to others.

If they have too little memory free, the container stays suspended.`,
		Example: `  gpuckpt resume job
  gpuckpt resume --gpus 1,0 job`,
	}, client.Running, func() (map[string]string, error) {
		orders := map[string]string{annotations.Suspend: "false"}
		if len(gpus) > 0 {
			orders[annotations.ResumeGPUs] = strings.Join(gpus, ",")
		}
		return orders, nil
	})
	c.Flags().StringSliceVar(&gpus, "gpus", nil, "UUIDs or CUDA's indices of GPUs, one for each that the container had, in their order (default: the same GPUs)")
	return c
}

// ordered is what suspend and resume print as JSON.
type ordered struct {
	Container string `json:"container"`
	State     string `json:"state"` // "suspended" or "running", or "left" with why
	Why       string `json:"why,omitempty"`
}

func orderCommand(c *cobra.Command, want client.ProcessStatus, orders func() (map[string]string, error)) *cobra.Command {
	var d daemon
	var pod string
	c.Args = cobra.ExactArgs(1)
	c.RunE = func(cmd *cobra.Command, args []string) error {
		given, err := orders()
		all := pod != "" && len(args) == 0
		if err == nil && pod != "" {
			args, err = pods.Containers(cmd.Context(), d.address, d.namespace, pod, args, true)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", cmd.Name(), err)
		}
		answers, state := []ordered{}, map[client.ProcessStatus]string{client.Paused: "suspended", client.Running: "running"}[want]
		var words string
		var failed, left []error
		for _, id := range args {
			err := d.annotate(cmd.Context(), id, given, want)
			if err == nil {
				answers = append(answers, ordered{id, state, ""})
				continue
			}
			if all && (errdefs.IsNotFound(err) || errdefs.IsAlreadyExists(err)) { // it uses no GPU, or is there already
				answers = append(answers, ordered{id, "left", err.Error()})
				words += fmt.Sprintf("left %s: %v\n", id, err)
				left = append(left, fmt.Errorf("%s %s: %w", cmd.Name(), id, err))
				continue
			}
			failed = append(failed, fmt.Errorf("%s %s: %w", cmd.Name(), id, err))
		}
		if len(left) == len(args) { // so nothing was done
			failed = left
		}
		if pod != "" {
			failed = append(failed, d.print(cmd, map[string]any{"containers": answers}, words))
		} else if failed == nil {
			return d.print(cmd, answers[0], "")
		}
		return errors.Join(failed...)
	}
	pods.Flag(c, &pod)
	c.ValidArgsFunction = first(d.containers)
	d.answerFlags(c)
	return c
}

// annotate sends a container's task an update with annotations alone, and checks that the task came
// to the state that they ask for: other runtimes ignore them.
func (d *daemon) annotate(ctx context.Context, id string, annotations map[string]string, want client.ProcessStatus) (err error) {
	ctx, c, err := d.connect(ctx)
	if err != nil {
		return err
	}
	defer joinClose(&err, c)
	container, err := localstore.FindContainer(ctx, c, id)
	if err != nil {
		return err
	}
	task, err := container.Task(ctx, nil)
	if err != nil {
		return fmt.Errorf("find the task of container %s: %w", id, err)
	}
	info, err := container.Info(ctx)
	if err != nil {
		return fmt.Errorf("read the runtime of container %s: %w", id, err)
	}
	before, err := task.Status(ctx)
	if err != nil {
		return fmt.Errorf("read the state of container %s: %w", id, err)
	}
	process, _ := proc.StatusOf(int(task.Pid()))
	_, shim := process.Shim() // CRI may name it by its path
	if before.Status == want && info.Runtime.Name != runtimeName && shim != proc.ShimName {
		return fmt.Errorf("it is %s already: its runtime, %s, is not gpuckpt's", before.Status, info.Runtime.Name)
	}
	// runc's shim dies of an update without resources, and its container with it.
	none := client.WithResources(&specs.LinuxResources{})
	if err := task.Update(ctx, none, client.WithAnnotations(annotations)); ctx.Err() != nil {
		return fmt.Errorf("%w: what has begun goes on, and `gpuckpt ps` shows how it ends", cmp.Or(err, ctx.Err()))
	} else if err != nil {
		return err
	}
	after, err := task.Status(ctx)
	if err != nil {
		return fmt.Errorf("read the state of container %s: %w", id, err)
	}
	if after.Status != want {
		return fmt.Errorf("it is %s: its runtime, %s, is not gpuckpt's", after.Status, info.Runtime.Name)
	}
	return nil
}
