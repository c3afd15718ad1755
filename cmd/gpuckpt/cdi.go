// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/cli/cudatool"
)

func cdiCommand() *cobra.Command {
	var output, root string
	generate := &cobra.Command{
		Use:   "generate",
		Short: "Write a CDI specification of this node's GPUs",
		Long: `Write a CDI specification of this node's GPUs: nvidia.com/gpu=0, nvidia.com/gpu=GPU-…,
nvidia.com/gpu=all, with the driver's libraries and tools for computing.

It is for nodes without NVIDIA's container toolkit. With the toolkit, prefer nvidia-ctk cdi
generate, which also knows graphics and partitioned GPUs (MIG). Write it again after a driver
update.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			place, err := cudatool.FindDriver()
			if err != nil {
				return err
			}
			node, err := describeNode(cmd.Context(), cuda.Options{LibraryDir: place.Dir})
			if err != nil {
				return err
			}
			if node.Root, err = filepath.Abs(cmp.Or(root, place.Root, "/")); err != nil {
				return err
			}
			spec, err := node.Generate()
			if err != nil {
				return err
			}
			if output != "" {
				return cdi.WriteFile(output, spec)
			}
			data, err := cdi.Encode(spec)
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(data)
			return err
		},
	}
	generate.Flags().StringVar(&output, "output", "", "file to write, such as /etc/cdi/nvidia.json (default: standard output)")
	generate.Flags().StringVar(&root, "driver-root", "", "where the driver's files are, such as /run/nvidia/driver (default: where the driver is found)")
	_ = generate.MarkFlagFilename("output")
	_ = generate.MarkFlagDirname("driver-root")
	return group(&cobra.Command{Use: "cdi", Short: "Write the node's CDI specification, by which GPUs get into containers"}, generate)
}

func describeNode(ctx context.Context, opts cuda.Options) (node cdi.Node, err error) {
	h, err := cuda.Start(ctx, opts)
	if err != nil {
		return cdi.Node{}, err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	info, err := h.Info(ctx)
	if err != nil {
		return cdi.Node{}, err
	}
	node.Driver = info.DriverVersion
	for _, g := range info.Partitioned {
		node.Partitioned = append(node.Partitioned, cdi.GPU{UUID: g.UUID, Index: g.Index, Minor: g.Minor})
	}
	for _, g := range info.GPUs {
		// CUDA lists a MIG instance by a UUID that NVML's list of nodes does not have.
		if g.Minor >= 0 || len(info.Partitioned) == 0 {
			node.GPUs = append(node.GPUs, cdi.GPU{UUID: g.UUID, Name: g.Name, Memory: g.Memory, Index: g.Index, Minor: g.Minor, PCIBusID: g.PCIBusID})
		}
	}
	return node, nil
}
