// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/containerd/containerd/v2/core/containers"
	ctroci "github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/go-cni"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/spf13/cobra"
)

// withCNI adds to a container the networks of the node's CNI configuration, by hooks. runc runs the first
// one before it restores sockets: no client knows a process of the container by then. It runs the second one
// whoever removes the container.
func withCNI(namespace string) ctroci.SpecOpts {
	return func(_ context.Context, _ ctroci.Client, c *containers.Container, s *ctroci.Spec) error {
		if _, err := networks(); err != nil {
			return err
		}
		self, err := os.Executable()
		if err != nil {
			return err
		}
		if s.Hooks == nil {
			s.Hooks = new(specs.Hooks)
		}
		hook := func(does string) specs.Hook {
			return specs.Hook{Path: self, Args: []string{"gpuckpt", "cni", does, namespace + "-" + c.ID}, Env: []string{"PATH=" + os.Getenv("PATH")}} // whoever sees the spec sees it
		}
		s.Hooks.CreateRuntime = append(s.Hooks.CreateRuntime, hook("add"))
		s.Hooks.Poststop = append(s.Hooks.Poststop, hook("del"))
		return nil
	}
}

func networks() (cni.CNI, error) {
	n, err := cni.New(cni.WithDefaultConf)
	if err != nil {
		return nil, fmt.Errorf("--cni: read the networks in %s: %w", cni.DefaultNetDir, err)
	}
	return n, nil
}

// cniCommand is what runc runs. It gets the container's state on standard input.
func cniCommand() *cobra.Command {
	return &cobra.Command{Use: "cni add|del ID", Hidden: true, Args: cobra.ExactArgs(2), ValidArgs: []string{"add", "del"}, RunE: func(cmd *cobra.Command, args []string) error {
		n, err := networks()
		if err != nil {
			return err
		}
		if args[0] == "del" {
			return n.Remove(cmd.Context(), args[1], "")
		}
		var state specs.State
		if err := json.NewDecoder(cmd.InOrStdin()).Decode(&state); err != nil {
			return fmt.Errorf("read the container's state: %w", err)
		}
		if _, err := n.Setup(cmd.Context(), args[1], fmt.Sprintf("/proc/%d/ns/net", state.Pid)); err != nil {
			return errors.Join(err, n.Remove(cmd.Context(), args[1], ""))
		}
		return nil
	}}
}
