// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package pods is the flag --pod of commands that take containers.
package pods

import (
	"context"
	"errors"

	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/images/capture"
	"github.com/gpuckpt/gpuckpt/images/localstore"
)

// Namespace is containerd's namespace of Kubernetes' containers.
const Namespace = "k8s.io"

// Flag adds --pod. With it the arguments of a command are names of containers in the pod.
func Flag(c *cobra.Command, pod *string) {
	c.Flags().StringVar(pod, "pod", "", "all containers of this pod of Kubernetes, NAME or NAMESPACE/NAME, or the named ones")
	args := c.Args
	c.Args = func(c *cobra.Command, given []string) error {
		if *pod != "" {
			return nil
		}
		return args(c, given)
	}
}

// Containers returns the IDs of a pod's containers in a namespace of containerd: the named ones, or all.
func Containers(ctx context.Context, address, namespace, pod string, names []string, running bool) (ids []string, err error) {
	c, err := localstore.Dial(address, namespace)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	targets, err := capture.Pod(namespaces.WithNamespace(ctx, namespace), c, pod, names, "", "", running)
	for _, t := range targets {
		ids = append(ids, t.ID)
	}
	return ids, err
}
