// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"

	"github.com/containerd/containerd/v2/client"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// annotate sends a container's task an update with annotations alone, and checks
// that it came to the state they ask for: a runtime that does not know them
// ignores them.
func (d *daemon) annotate(ctx context.Context, id string, annotations map[string]string, want client.ProcessStatus) (err error) {
	ctx, c, err := d.connect(ctx)
	if err != nil {
		return err
	}
	defer joinClose(&err, c)
	container, err := c.LoadContainer(ctx, id)
	if err != nil {
		return fmt.Errorf("find container %s in namespace %s: %w", id, d.namespace, err)
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
	if before.Status == want && info.Runtime.Name != runtimeName {
		return fmt.Errorf("it is %s already: its runtime, %s, is not gpuckpt's", before.Status, info.Runtime.Name)
	}
	// runc's shim dies of an update without resources, and its container with it.
	none := client.WithResources(&specs.LinuxResources{})
	if err := task.Update(ctx, none, client.WithAnnotations(annotations)); err != nil {
		return err
	}
	status, err := task.Status(ctx)
	if err != nil {
		return fmt.Errorf("read the state of container %s: %w", id, err)
	}
	if status.Status == want {
		return nil
	}
	return fmt.Errorf("it is %s: its runtime, %s, is not gpuckpt's", status.Status, info.Runtime.Name)
}
