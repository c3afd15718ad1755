// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"path/filepath"

	"github.com/containerd/containerd/v2/client"
	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/images/annotations"
)

func suspendCommand() *cobra.Command {
	var d daemon
	var spill string
	c := &cobra.Command{
		Use:   "suspend CONTAINER",
		Short: "Take a container off its GPUs, in place",
		Long: `Take a container off its GPUs, in place.

Its GPU memory goes to host memory, or with --spill to a disk, and its processes
stay, frozen, until "gpuckpt resume" or "ctr tasks resume". Others can use the
GPUs meanwhile.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			orders := map[string]string{annotations.Suspend: "true"}
			if spill != "" {
				dir, err := filepath.Abs(spill) // the shim has another working directory
				if err != nil {
					return fmt.Errorf("--spill: %w", err)
				}
				orders[annotations.SuspendSpill] = dir
			}
			if err := d.annotate(cmd.Context(), args[0], orders, client.Paused); err != nil {
				return fmt.Errorf("suspend %s: %w", args[0], err)
			}
			return nil
		},
	}
	c.ValidArgsFunction = first(d.containers)
	d.addressFlags(c)
	c.Flags().StringVar(&spill, "spill", "", "write the GPU state to this directory on a disk, so that it takes no memory")
	_ = c.MarkFlagDirname("spill")
	return c
}
