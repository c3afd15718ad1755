// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/defaults"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/spf13/cobra"
)

// taskOptions say which containerd and namespace a container is looked for in,
// as ctr's flags and variables do.
type taskOptions struct {
	address   string
	namespace string
}

func (o *taskOptions) register(c *cobra.Command) {
	c.Flags().StringVarP(&o.address, "address", "a", envOr("CONTAINERD_ADDRESS", defaults.DefaultAddress), "containerd's socket ($CONTAINERD_ADDRESS)")
	c.Flags().StringVarP(&o.namespace, "namespace", "n", envOr(namespaces.NamespaceEnvVar, namespaces.Default), "containerd's namespace ($CONTAINERD_NAMESPACE); Kubernetes uses k8s.io")
}

// envOr is an environment variable, or what to use where it is not set.
func envOr(name, otherwise string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return otherwise
}

// annotate sends a container's task an update with annotations alone, and checks
// that it came to the state they ask for: a runtime that does not know them
// ignores them.
func (o *taskOptions) annotate(ctx context.Context, id string, annotations map[string]string, want client.ProcessStatus) (err error) {
	c, err := client.New(o.address, client.WithDefaultNamespace(o.namespace))
	if err != nil {
		return fmt.Errorf("connect to containerd: %w", err)
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	container, err := c.LoadContainer(ctx, id)
	if err != nil {
		return fmt.Errorf("find container %s in namespace %s: %w", id, o.namespace, err)
	}
	task, err := container.Task(ctx, nil)
	if err != nil {
		return fmt.Errorf("find the task of container %s: %w", id, err)
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
	info, err := container.Info(ctx)
	if err != nil {
		return fmt.Errorf("read the runtime of container %s: %w", id, err)
	}
	return fmt.Errorf("it is %s: its runtime, %s, is not gpuckpt's", status.Status, info.Runtime.Name)
}
