// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// The runtimes that containers are run with.
const (
	// Runtime is this project's shim.
	Runtime = "io.containerd.gpuckpt.v2"
	// RuncRuntime is containerd's own.
	RuncRuntime = "io.containerd.runc.v2"
)

// RunSpec says how a container is run. Only ID is needed.
type RunSpec struct {
	ID string
	// Runtime is the shim's name; empty for Runtime.
	Runtime string
	// Image is the image's name; empty for WorkloadImage.
	Image string
	// Args are the whole command line, program first, as ctr takes it: the
	// image's entrypoint is used only where there are none.
	Args []string
	// GPUs are the indices of the GPUs that the container gets.
	GPUs []int
	// Port is the UDP port that the program will listen on, for
	// Container.Ask; see FreePort. The program must get it in Args.
	Port int
	// Ports is how many programs of the container listen, on Port and those
	// after it, where Gpuwork is to find them; 0 is one.
	Ports int
	// OwnNetwork gives the container a network of its own, without
	// interfaces. Else it shares the host's.
	OwnNetwork bool
	Mounts     []specs.Mount
	// Annotations are the OCI annotations, by name.
	Annotations map[string]string
	// Env are variables, KEY=value each.
	Env []string
	// MemoryLimit is the cgroup's, in bytes; 0 is none.
	MemoryLimit uint64
	// CtrFlags are further flags of "ctr containers create".
	CtrFlags []string
	// Amend are further changes of the spec, made last.
	Amend []oci.SpecOpts
}

// Container is one container of an instance. After its end, or a restore under
// the same id, the value still names the id.
type Container struct {
	ID   string
	Port int

	c       *Containerd
	of      *Container // whose program it is, for one of Process
	mu      sync.Mutex
	streams []io.Closer // the restored container's output
}

// Create makes a container with "ctr containers create", then adds the GPUs'
// nodes to its spec: ctr cannot name a node other than by the host's own path.
// No process is started. On error no container is left.
func (c *Containerd) Create(ctx context.Context, spec RunSpec) (*Container, error) {
	if _, err := c.Ctr(ctx, c.createArgs(spec)...); err != nil {
		return nil, fmt.Errorf("create the container %s: %w", spec.ID, err)
	}
	k := &Container{ID: spec.ID, Port: spec.Port, c: c}
	_ = os.Remove(k.log()) // of an earlier container of that id, if any
	opts := c.opts.GPU.SpecOpts(spec.GPUs...)
	if len(opts) > 0 && c.opts.GPU.Kind == SoftwareGPU {
		opts = append(opts, oci.WithMounts([]specs.Mount{{
			Destination: "/etc/softcuda.conf", Source: c.softwareConfig(),
			Type: "bind", Options: []string{"rbind", "ro", "rprivate"},
		}}))
	}
	if err := c.amendSpec(ctx, spec.ID, append(opts, spec.Amend...)); err != nil {
		return nil, errors.Join(fmt.Errorf("create the container %s: %w", spec.ID, err), k.Remove(context.WithoutCancel(ctx)))
	}
	return k, nil
}

// createArgs are ctr's arguments for a container.
func (c *Containerd) createArgs(spec RunSpec) []string {
	args := []string{"containers", "create", "--snapshotter", c.snapshotter}
	if spec.Runtime == "" {
		spec.Runtime = Runtime
	}
	args = append(args, "--runtime", spec.Runtime)
	if !spec.OwnNetwork {
		args = append(args, "--net-host")
	}
	for _, m := range spec.Mounts {
		args = append(args, "--mount", fmt.Sprintf("type=%s,src=%s,dst=%s,options=%s", m.Type, m.Source, m.Destination, strings.Join(m.Options, ":")))
	}
	for name, value := range spec.Annotations {
		args = append(args, "--annotation", name+"="+value)
	}
	for _, variable := range spec.Env {
		args = append(args, "--env", variable)
	}
	if spec.MemoryLimit > 0 {
		args = append(args, "--memory-limit", strconv.FormatUint(spec.MemoryLimit, 10))
	}
	args = append(args, spec.CtrFlags...)
	if spec.Image == "" {
		spec.Image = WorkloadImage
	}
	args = append(args, spec.Image, spec.ID)
	return append(args, spec.Args...)
}

// amendSpec applies opts to a container's spec.
func (c *Containerd) amendSpec(ctx context.Context, id string, opts []oci.SpecOpts) error {
	if len(opts) == 0 {
		return nil
	}
	container, err := c.client.LoadContainer(ctx, id)
	if err != nil {
		return fmt.Errorf("load the container %s: %w", id, err)
	}
	spec, err := container.Spec(ctx)
	if err != nil {
		return fmt.Errorf("read the spec of %s: %w", id, err)
	}
	err = container.Update(ctx, func(ctx context.Context, cl *client.Client, k *containers.Container) error {
		for _, opt := range opts {
			if err := opt(ctx, cl, k, spec); err != nil {
				return err
			}
		}
		k.Spec, err = typeurl.MarshalAnyToProto(spec)
		return err
	})
	if err != nil {
		return fmt.Errorf("amend the spec of %s: %w", id, err)
	}
	return nil
}

// Run creates a container and starts it with "ctr tasks start --detach". Its
// output goes through the shim's pipes into a file, so that CRIU meets no file
// of the host. On error no container is left.
func (c *Containerd) Run(ctx context.Context, spec RunSpec) (*Container, error) {
	k, err := c.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	if err := k.Start(ctx); err != nil {
		return nil, errors.Join(err, k.Remove(context.WithoutCancel(ctx)))
	}
	return k, nil
}

// Start starts a created container in the background. On error the container
// stays, without a task.
func (k *Container) Start(ctx context.Context) error {
	if _, err := k.c.Ctr(ctx, "tasks", "start", "--detach", "--log-uri", "file://"+k.log(), k.ID); err != nil {
		return fmt.Errorf("start the container %s: %w", k.ID, err)
	}
	return nil
}

// log is the file of the container's output.
func (k *Container) log() string {
	if k.of != nil {
		return k.of.log()
	}
	return filepath.Join(k.c.home.logs(), k.ID+".log")
}

// Logs is what the container's program has written up to now, standard output
// and standard error in one; after a restore under the same id, what it wrote
// since comes after it.
func (k *Container) Logs() string {
	data, err := os.ReadFile(k.log())
	if err != nil {
		return ""
	}
	return string(data)
}

// task loads the container's task.
func (k *Container) task(ctx context.Context) (client.Task, error) {
	container, err := k.c.client.LoadContainer(ctx, k.ID)
	if err != nil {
		return nil, fmt.Errorf("load the container %s: %w", k.ID, err)
	}
	task, err := container.Task(ctx, nil)
	if err != nil {
		return nil, fmt.Errorf("load the task of %s: %w", k.ID, err)
	}
	return task, nil
}

// Pid is the container's first process, as the host counts.
func (k *Container) Pid(ctx context.Context) (int, error) {
	task, err := k.task(ctx)
	if err != nil {
		return 0, err
	}
	if task.Pid() == 0 {
		return 0, fmt.Errorf("find the process of %s: the shim says 0", k.ID)
	}
	return int(task.Pid()), nil
}

// Status is the task's state in containerd's words: "running", "paused",
// "stopped". The error is errdefs.ErrNotFound when there is no task.
func (k *Container) Status(ctx context.Context) (client.ProcessStatus, error) {
	task, err := k.task(ctx)
	if err != nil {
		return "", err
	}
	status, err := task.Status(ctx)
	if err != nil {
		return "", fmt.Errorf("read the status of %s: %w", k.ID, err)
	}
	return status.Status, nil
}

// Wait returns the exit code of the container's first process, once it has ended.
func (k *Container) Wait(ctx context.Context) (int, error) {
	task, err := k.task(ctx)
	if err != nil {
		return 0, err
	}
	exits, err := task.Wait(ctx)
	if err != nil {
		return 0, fmt.Errorf("wait for %s: %w", k.ID, err)
	}
	status := <-exits
	code, _, err := status.Result()
	if err != nil {
		return 0, fmt.Errorf("wait for %s: %w", k.ID, err)
	}
	return int(code), nil
}

// Kill kills the container with "ctr tasks kill" and waits for its end. The
// container stays, with a stopped task. It is no error when it has ended already.
func (k *Container) Kill(ctx context.Context) error {
	_, err := k.c.Ctr(ctx, "tasks", "kill", "--signal", "SIGKILL", k.ID)
	for {
		status, statusErr := k.Status(ctx)
		if statusErr != nil {
			return fmt.Errorf("kill %s: %w", k.ID, errors.Join(err, statusErr))
		}
		if status == client.Stopped {
			return nil
		}
		if err != nil {
			return fmt.Errorf("kill %s: %w", k.ID, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("kill %s: it is %s: %w", k.ID, status, context.Cause(ctx))
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// Remove kills the container if it runs and removes task, container and
// snapshot, with ctr. It is no error when there is none of them.
func (k *Container) Remove(ctx context.Context) error {
	defer k.closeStreams()
	task, err := k.task(ctx)
	if err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("remove the container %s: %w", k.ID, err)
	}
	if err == nil {
		// A task without a process is what a failed restore leaves; it
		// can be deleted, and cannot be killed.
		if task.Pid() != 0 {
			if err := k.Kill(ctx); err != nil {
				return err
			}
		}
		if _, err := k.c.Ctr(ctx, "tasks", "delete", k.ID); err != nil {
			return fmt.Errorf("remove the container %s: %w", k.ID, err)
		}
	}
	if _, err := k.c.client.LoadContainer(ctx, k.ID); errdefs.IsNotFound(err) {
		return nil
	}
	if _, err := k.c.Ctr(ctx, "containers", "delete", k.ID); err != nil {
		return fmt.Errorf("remove the container %s: %w", k.ID, err)
	}
	return nil
}

// removeContainers ends and removes all containers of the instance, without ctr.
func (c *Containerd) removeContainers(ctx context.Context) error {
	list, err := c.client.Containers(ctx)
	if err != nil {
		return fmt.Errorf("list the containers: %w", err)
	}
	var errs []error
	for _, container := range list {
		task, err := container.Task(ctx, cio.Load) // with its FIFOs, which go with the task
		if err == nil {
			_ = task.Kill(ctx, syscall.SIGKILL)
			_, err = task.Delete(ctx, client.WithProcessKill)
		}
		if err != nil && !errdefs.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("end the container %s: %w", container.ID(), err))
			continue
		}
		if err := container.Delete(ctx, client.WithSnapshotCleanup); err != nil {
			errs = append(errs, fmt.Errorf("remove the container %s: %w", container.ID(), err))
		}
	}
	return errors.Join(errs...)
}

// Adopt is the container of that id, which another program has made in the
// instance. port is where it listens, for Ask.
func (c *Containerd) Adopt(id string, port int) *Container {
	return &Container{ID: id, Port: port, c: c}
}
