// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"

	"github.com/containerd/containerd/v2/client"
	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/images/annotations"
)

func resumeCommand() *cobra.Command {
	var d daemon
	var gpus []string
	c := &cobra.Command{
		Use:   "resume CONTAINER",
		Short: "Return a suspended container to its GPUs, or to others",
		Long: `Return a suspended container to its GPUs, or to others.

If they have too little memory free, the container stays suspended.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			orders := map[string]string{annotations.Suspend: "false"}
			if len(gpus) > 0 {
				orders[annotations.ResumeGPUs] = strings.Join(gpus, ",")
			}
			if err := d.annotate(cmd.Context(), args[0], orders, client.Running); err != nil {
				return fmt.Errorf("resume %s: %w", args[0], err)
			}
			return nil
		},
	}
	c.ValidArgsFunction = first(d.containers)
	d.addressFlags(c)
	c.Flags().StringSliceVar(&gpus, "gpus", nil, "UUIDs or CUDA's indices of GPUs, one for each that the container had, in their order (default: the same GPUs)")
	return c
}
