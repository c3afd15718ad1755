// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Container is a running container that uses GPUs.
type Container struct {
	Namespace, ID string
	// Bytes of GPU memory in use, by the GPU's index.
	Bytes map[int]uint64
	// Shim is the executable of its shim, "" if it cannot be read.
	Shim string
}

// CheckContainers checks whether there is room for a checkpoint of each GPU container.
func CheckContainers(ctx context.Context, n *Node, g GPUs, r Room) []Check {
	a := area{name: "container"}
	if n.Containerd == nil || g.SurveyErr != nil {
		return nil // neither containers nor what they use are known
	}
	found, err := containers(ctx, n.Containerd, g.Survey)
	if err != nil {
		return a.with(Warning, "list", err.Error(), "the containers cannot be looked at", "ctr --address "+n.Containerd.Address+" namespaces ls")
	}
	for _, c := range found {
		a.container(n, c, r)
	}
	return a.checks
}

func (a *area) container(n *Node, c Container, r Room) {
	name := c.Namespace + "/" + c.ID
	var bytes uint64
	var where []string
	for _, index := range slices.Sorted(maps.Keys(c.Bytes)) {
		bytes += c.Bytes[index]
		where = append(where, fmt.Sprintf("%s on GPU %d", size(c.Bytes[index]), index))
	}
	found := "has " + strings.Join(where, ", ")
	if c.Shim != "" && !isShim(c.Shim) {
		a.add(Warning, name, found+", and the shim "+filepath.Base(c.Shim), "it cannot be checkpointed", "# start it anew with the runtime io.containerd.gpuckpt.v2")
		return
	}
	var problems, fixes []string
	for _, need := range []struct {
		limited bool
		of      string
		free    uint64
		fix     string
	}{
		{n.StagingLimit > 0, "memory for GPU state", n.StagingLimit, "# raise memory_limit of [staging], or set its when_short = \"write-through\", in /etc/gpuckpt/config.toml"},
		{true, "memory", r.Memory, "# free memory, or add some"},
		{true, "room in " + r.Temp, r.TempFree, "# set TMPDIR in containerd's environment to a directory with room"},
		{r.Root != "", "room in " + r.Root, r.RootFree, "ctr content prune references; df " + r.Root},
	} {
		if need.limited && bytes > need.free {
			problems = append(problems, fmt.Sprintf("a checkpoint needs %s of %s, and %s is free", size(bytes), need.of, size(need.free)))
			fixes = append(fixes, need.fix)
		}
	}
	a.either(problems == nil, name, found+": a checkpoint fits", Warning, found, strings.Join(problems, "; "), strings.Join(fixes, "\n"))
}

// containers returns the containers of all namespaces for which NVML counts GPU memory. A process
// belongs to the container in whose cgroup it is.
func containers(ctx context.Context, d *Daemon, survey cuda.Survey) ([]Container, error) {
	c, err := client.New(d.Address, client.WithTimeout(dialTimeout))
	if err != nil {
		return nil, err
	}
	defer c.Close()
	all, err := c.NamespaceService().List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list namespaces: %w", err)
	}
	var found []Container
	for _, namespace := range all {
		list, err := c.TaskService().List(namespaces.WithNamespace(ctx, namespace), &tasks.ListTasksRequest{})
		if err != nil {
			return nil, fmt.Errorf("list the containers of namespace %s: %w", namespace, err)
		}
		for _, t := range list.Tasks {
			if t.Status == task.Status_STOPPED || t.Pid == 0 {
				continue
			}
			k := Container{Namespace: namespace, ID: t.ID, Bytes: Used(int(t.Pid), survey)}
			if len(k.Bytes) == 0 {
				continue
			}
			status, _ := proc.StatusOf(int(t.Pid)) // "" if it has just ended
			k.Shim, _ = os.Readlink(fmt.Sprintf("/proc/%d/exe", status.Parent()))
			found = append(found, k)
		}
	}
	return found, nil
}

// Used adds up the GPU memory of the processes in the cgroup of one, by GPU.
func Used(pid int, survey cuda.Survey) map[int]uint64 {
	cgroup, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return nil
	}
	bytes := make(map[int]uint64)
	for _, d := range survey.Devices {
		for _, u := range d.Users {
			if theirs, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", u.PID)); err == nil && string(theirs) == string(cgroup) {
				bytes[d.Index] += u.Bytes
			}
		}
	}
	return bytes
}
