// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package recovercmd is the sub-command "gpuckpt recover".
package recovercmd

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/defaults"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/images/capture"
	"github.com/gpuckpt/gpuckpt/internal/cli/pods"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/operation/journal"
	"github.com/gpuckpt/gpuckpt/internal/recovery"
)

// Command returns the command.
func Command() *cobra.Command {
	var namespace, address, dumps, pod string
	var asJSON, kill bool
	c := &cobra.Command{
		Use:   "recover [CONTAINER] | --pod POD [CONTAINER...]",
		Short: "Undo what a shim or a node that died has left",
		Long: `Undo what a shim or a node that died has left, of one container or of all.

It reads the records that shims keep of containers that they change (state_dir in the
configuration). Where the shim is dead it thaws and unlocks the container, if containerd has
not ended it. It removes incomplete checkpoints, GPU state that is of no use, and what a
restore has left. It prints what it did and what you must do. It leaves complete
checkpoints alone, and containers whose shim lives. It also resumes the containers that a
killed "gpuckpt checkpoint" had paused.`,
		Example: `  gpuckpt recover
  gpuckpt recover --namespace k8s.io CONTAINER`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			node, err := config.Load()
			if err != nil {
				return err
			}
			var paths []string
			if pod == "" {
				paths, err = chosen(node.StateDir, namespace, args)
			} else {
				namespace = cmp.Or(namespace, pods.Namespace)
				args, err = pods.Containers(cmd.Context(), address, namespace, pod, args, false)
				for _, id := range args {
					paths = append(paths, journal.Path(node.StateDir, namespace, id))
				}
			}
			if err != nil {
				return err
			}
			reports := []recovery.Report{}
			var failed error
			if len(args) == 0 {
				reports, failed = clients(cmd.Context(), address, dumps)
			}
			for _, path := range paths {
				r, err := recovery.Recover(cmd.Context(), node, path, kill)
				if errors.Is(err, os.ErrNotExist) {
					continue // its shim was quicker, or one of a pod has nothing to undo
				}
				if err != nil {
					failed = errors.Join(failed, fmt.Errorf("recover %s: %w", path, err))
				}
				reports = append(reports, r)
			}
			return errors.Join(write(cmd.OutOrStdout(), reports, asJSON), failed)
		},
	}
	pods.Flag(c, &pod)
	c.Flags().StringVarP(&namespace, "namespace", "n", os.Getenv(namespaces.NamespaceEnvVar), "containerd's namespace ($CONTAINERD_NAMESPACE; default: all, \"default\" for one CONTAINER, or \"k8s.io\" for a pod)")
	c.Flags().StringVarP(&address, "address", "a", cmp.Or(os.Getenv("CONTAINERD_ADDRESS"), defaults.DefaultAddress), "containerd's socket ($CONTAINERD_ADDRESS)")
	c.Flags().StringVar(&dumps, "image-path", cmp.Or(os.Getenv("GPUCKPT_IMAGE_PATH"), capture.DefaultDir), "where \"gpuckpt checkpoint\" makes its dumps ($GPUCKPT_IMAGE_PATH)")
	_ = c.MarkFlagDirname("image-path")
	c.Flags().BoolVar(&kill, "kill", false, "end containers that cannot continue, because their GPU state was lost with their shim")
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

// clients lets what killed checkpoints had paused run on.
func clients(ctx context.Context, address, dumps string) (reports []recovery.Report, err error) {
	var c *client.Client
	left, err := capture.Recover(ctx, func() (_ *client.Client, err error) {
		if c == nil {
			c, err = client.New(address, client.WithTimeout(10*time.Second))
		}
		return c, err
	}, dumps)
	if c != nil {
		err = errors.Join(err, c.Close())
	}
	reports = []recovery.Report{}
	for _, l := range left {
		r := recovery.Report{Namespace: l.Namespace, Container: l.Container, Operation: "gpuckpt checkpoint", Done: []string{"removed its dump"}}
		if l.Resumed {
			r.Done = append(r.Done, "resumed it")
		}
		reports = append(reports, r)
	}
	return reports, err
}

// chosen returns the paths of the records to look at.
func chosen(dir, namespace string, args []string) ([]string, error) {
	if len(args) == 0 {
		return journal.List(dir, cmp.Or(namespace, "*"))
	}
	namespace = cmp.Or(namespace, namespaces.Default)
	path := journal.Path(dir, namespace, args[0])
	if _, err := journal.Read(path); errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("there is no record of container %s in namespace %s: nothing is left to undo", args[0], namespace)
	}
	return []string{path}, nil
}

func write(w io.Writer, reports []recovery.Report, asJSON bool) error {
	if asJSON {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		e.SetEscapeHTML(false)
		return e.Encode(reports)
	}
	for _, r := range reports {
		where := r.Operation
		if r.Step != "" {
			where += ", step " + r.Step
		}
		fmt.Fprintf(w, "%s/%s (%s)\n", r.Namespace, r.Container, where)
		for _, did := range r.Done {
			fmt.Fprintf(w, "  done:   %s\n", did)
		}
		for _, todo := range r.ToDo {
			fmt.Fprintf(w, "  to do:  %s\n", todo)
		}
	}
	return nil
}
