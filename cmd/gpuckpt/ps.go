// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/docker/go-units"
	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images/capture"
	"github.com/gpuckpt/gpuckpt/internal/cli/doctor"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
	"github.com/gpuckpt/gpuckpt/internal/node/visible"
	"github.com/gpuckpt/gpuckpt/internal/operation/oplog"
	"github.com/gpuckpt/gpuckpt/internal/operation/sequence"
)

// listed is one container of ps.
type listed struct {
	Namespace string `json:"namespace"`
	Container string `json:"container"`
	// Pod is NAMESPACE/POD/NAME of a container of a pod.
	Pod string `json:"pod,omitempty"`
	// State is containerd's word, or "suspended".
	State string `json:"state"`
	GPUs  int    `json:"gpus"`     // that the spec grants
	Bytes uint64 `json:"gpuBytes"` // in use
	// Last is the last checkpoint, restore, suspend or resume, if it has had one.
	Last *lastOperation `json:"last,omitempty"`
	// Problem is why it cannot be checkpointed, as far as is known: "" if nothing is known.
	Problem string `json:"problem,omitempty"`
}

type lastOperation struct {
	Operation string    `json:"operation"`
	Ended     time.Time `json:"ended"`
	Seconds   float64   `json:"seconds"`
	Error     string    `json:"error,omitempty"` // why it failed
	suspended bool      // that is what it left
}

func psCommand() *cobra.Command {
	var d daemon
	var everywhere, all bool
	c := &cobra.Command{
		Use:   "ps",
		Short: "List the GPU containers of this node",
		Long: `List the GPU containers of this node: their state, their GPUs, the GPU memory in use, the last
operation. A problem is what is known to prevent a checkpoint.`,
		Example: `  gpuckpt ps
  gpuckpt ps --all-namespaces --json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			ctx, c, err := d.connect(cmd.Context())
			if err != nil {
				return err
			}
			defer joinClose(&err, c)
			names := []string{d.namespace}
			if everywhere {
				if names, err = c.NamespaceService().List(ctx); err != nil {
					return fmt.Errorf("list namespaces: %w", err)
				}
			}
			n := doctor.Node{}
			if running, err := doctor.Find(d.address); err == nil {
				n.Containerd, n.Env = running, running.Env
			}
			if _, err := configure(&n); err != nil {
				return err
			}
			survey := doctor.AskDriver(ctx, &n).Survey // empty where there is no driver
			found := []listed{}
			for _, name := range names {
				some, err := list(namespaces.WithNamespace(ctx, name), c, survey, all)
				if err != nil {
					return fmt.Errorf("list the containers of namespace %s: %w", name, err)
				}
				found = append(found, some...)
			}
			return d.print(cmd, found, psText(found, time.Now()))
		},
	}
	d.answerFlags(c)
	c.Flags().BoolVarP(&everywhere, "all-namespaces", "A", false, "list the containers of all of containerd's namespaces")
	c.Flags().BoolVar(&all, "all", false, "list containers without GPUs too")
	return c
}

// list returns the GPU containers of a namespace, or all of its containers.
func list(ctx context.Context, c *client.Client, survey cuda.Survey, all bool) (found []listed, err error) {
	containers, err := c.Containers(ctx)
	if err != nil {
		return nil, err
	}
	for _, k := range containers {
		l, err := describe(ctx, k, survey)
		if errdefs.IsNotFound(err) {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("container %s: %w", k.ID(), err)
		}
		if all || l.GPUs > 0 || l.Bytes > 0 {
			found = append(found, l)
		}
	}
	slices.SortFunc(found, func(a, b listed) int { return strings.Compare(a.Container, b.Container) })
	return found, nil
}

func describe(ctx context.Context, k client.Container, survey cuda.Survey) (l listed, err error) {
	info, err := k.Info(ctx)
	if err != nil {
		return l, err
	}
	spec, err := k.Spec(ctx)
	if err != nil {
		return l, err
	}
	namespace, _ := namespaces.Namespace(ctx)
	l = listed{Namespace: namespace, Container: k.ID(), Pod: capture.PodOf(info.Labels), State: "created", GPUs: len(cdi.Read(spec).Minors)}
	task, err := k.Task(ctx, nil)
	if errdefs.IsNotFound(err) {
		l.State, l.Problem = "stopped", "it does not run"
		return l, nil
	}
	if err != nil {
		return l, err
	}
	status, err := task.Status(ctx)
	if err != nil {
		return l, err
	}
	l.State = string(status.Status)
	if l.State == string(client.Stopped) {
		l.Problem = "it does not run"
		return l, nil
	}
	l.Bytes = used(int(task.Pid()), survey)
	// The shim is the parent of the container's first process, and works in the bundle. That of a pod works
	// in the sandbox's, beside which the container's is.
	process, err := proc.StatusOf(int(task.Pid()))
	if err != nil {
		return l, nil // it has just ended
	}
	shim, program := process.Shim()
	if program != proc.ShimName {
		l.Problem = "its runtime, " + info.Runtime.Name + ", is not gpuckpt's"
		return l, nil
	}
	l.Last = last(fmt.Sprintf("/proc/%d/cwd/../%s/%s", shim, k.ID(), sequence.TimelineName))
	switch {
	case l.Last == nil:
	case l.Last.suspended && status.Status == client.Paused:
		l.State, l.Problem = "suspended", "resume it first"
	case l.Last.Operation == "checkpoint" && l.Last.Error != "":
		l.Problem = "the last try failed: " + l.Last.Error
	}
	return l, nil
}

// used adds up the GPU memory of the processes in the cgroup of one, in bytes.
func used(pid int, survey cuda.Survey) (bytes uint64) {
	cgroup, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return 0
	}
	for _, d := range survey.Devices {
		for _, u := range d.Users {
			if theirs, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", u.PID)); err == nil && string(theirs) == string(cgroup) {
				bytes += u.Bytes
			}
		}
	}
	return bytes
}

// last reads a timeline, nil if there is none.
func last(file string) *lastOperation {
	var t oplog.Entry
	data, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(data, &t)
	}
	st, serr := os.Stat(file)
	if err != nil || serr != nil {
		return nil
	}
	return &lastOperation{t.Operation, st.ModTime().UTC(), t.Took.Seconds(), t.Error, t.Suspended()}
}

// psText is a line for each container.
func psText(found []listed, now time.Time) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 3, ' ', 0)
	pods := slices.ContainsFunc(found, func(l listed) bool { return l.Pod != "" })
	row := func(pod string, cells ...string) {
		if pods {
			cells = slices.Insert(cells, 2, pod)
		}
		fmt.Fprintln(w, strings.Join(cells, "\t"))
	}
	row("POD", "NAMESPACE", "CONTAINER", "STATE", "GPUS", "GPU MEMORY", "LAST", "PROBLEM")
	for _, l := range found {
		did := "-"
		if l.Last != nil {
			if did = l.Last.Operation; l.Last.Error != "" {
				did += " failed"
			}
			did = fmt.Sprintf("%s %s ago", did, units.HumanDuration(now.Sub(l.Last.Ended)))
		}
		row(visible.Text(cmp.Or(l.Pod, "-")), l.Namespace, l.Container, l.State, strconv.Itoa(l.GPUs), size(l.Bytes), did, strings.ReplaceAll(cmp.Or(l.Problem, "-"), "\n", " "))
	}
	_ = w.Flush() // into memory
	return b.String()
}
