// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

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
	"github.com/docker/go-units"
	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/convert"
	"github.com/gpuckpt/gpuckpt/images/localstore"
	"github.com/gpuckpt/gpuckpt/internal/cli/progress"
)

// completeLimit bounds a shell's wait for a completion.
const completeLimit = time.Second

// daemon says which containerd a command talks to, in ctr's words, and how it answers.
type daemon struct {
	address, namespace string
	json, quiet        bool
}

// flags adds the flags of commands that talk to containerd and tell how far they are.
func (d *daemon) flags(c *cobra.Command) {
	d.answerFlags(c)
	c.Flags().Lookup("json").Usage = "print JSON, and progress as lines of JSON on standard error"
	c.Flags().BoolVarP(&d.quiet, "quiet", "q", false, "no progress")
}

// answerFlags adds the flags of all commands that talk to containerd.
func (d *daemon) answerFlags(c *cobra.Command) {
	f := c.Flags()
	f.StringVarP(&d.address, "address", "a", cmp.Or(os.Getenv("CONTAINERD_ADDRESS"), defaults.DefaultAddress), "containerd's socket ($CONTAINERD_ADDRESS)")
	f.StringVarP(&d.namespace, "namespace", "n", cmp.Or(os.Getenv(namespaces.NamespaceEnvVar), namespaces.Default),
		"containerd's namespace ($CONTAINERD_NAMESPACE); Kubernetes uses k8s.io")
	f.BoolVar(&d.json, "json", false, "print JSON")
}

// work is what a command does, in containerd's namespace. It answers for JSON and in words.
type work func(ctx context.Context, dial convert.Dial, progress images.Progress) (answer any, words string, err error)

// run does the work of a command, shows how far it is, and prints the answer. The connection to
// containerd is made once, when it is needed.
func (d *daemon) run(cmd *cobra.Command, do work) (err error) {
	var c *client.Client
	defer func() {
		if c != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	dial := func() (_ *client.Client, err error) {
		if c == nil {
			_, c, err = d.connect(cmd.Context())
		}
		return c, err
	}
	shown := progress.New(d.quiet, d.json)
	answer, words, err := do(namespaces.WithNamespace(cmd.Context(), d.namespace), dial, shown.Show)
	shown.Wait()
	if err != nil {
		return err
	}
	return d.print(cmd, answer, words)
}

func (d *daemon) print(cmd *cobra.Command, v any, words string) error {
	if d.json {
		e := json.NewEncoder(cmd.OutOrStdout())
		e.SetIndent("", "  ")
		e.SetEscapeHTML(false)
		return e.Encode(v)
	}
	_, err := io.WriteString(cmd.OutOrStdout(), words)
	return err
}

func size[T int64 | uint64](bytes T) string { return units.BytesSize(float64(bytes)) }

// connect connects to containerd. The context it returns carries the namespace.
func (d *daemon) connect(ctx context.Context) (_ context.Context, c *client.Client, err error) {
	if c, err = localstore.Dial(d.address, d.namespace); err != nil {
		return nil, nil, err
	}
	return namespaces.WithNamespace(ctx, d.namespace), c, nil
}

// snapshotter returns the one named, or else the default of containerd's namespace.
func (d *daemon) snapshotter(ctx context.Context, c *client.Client, named string) (string, error) {
	if named != "" {
		return named, nil
	}
	label, err := c.GetLabel(ctx, defaults.DefaultSnapshotterNSLabel)
	if err != nil {
		return "", fmt.Errorf("find the snapshotter of containerd's namespace %s: %w", d.namespace, err)
	}
	return cmp.Or(label, defaults.DefaultSnapshotter), nil
}

// Completions for a shell: containers, or images.

type completion = func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective)

// first completes the first argument alone.
func first(f completion) completion {
	return func(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return f(cmd, args, typed)
	}
}

func (d *daemon) containers(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	return d.list(cmd, func(ctx context.Context, c *client.Client) (names []string, _ error) {
		list, err := c.ContainerService().List(ctx)
		for _, k := range list {
			names = append(names, k.ID)
		}
		return names, err
	}), cobra.ShellCompDirectiveNoFileComp
}

// images completes with files as well: most commands take either.
func (d *daemon) images(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	return d.list(cmd, func(ctx context.Context, c *client.Client) (names []string, _ error) {
		list, err := c.ImageService().List(ctx)
		for _, i := range list {
			names = append(names, i.Name)
		}
		return names, err
	}), cobra.ShellCompDirectiveDefault
}

// list returns nothing where containerd does not answer at once.
func (d *daemon) list(cmd *cobra.Command, ask func(context.Context, *client.Client) ([]string, error)) []string {
	ctx, cancel := context.WithTimeout(cmd.Context(), completeLimit)
	defer cancel()
	ctx, c, err := d.connect(ctx)
	if err != nil {
		return nil
	}
	defer c.Close()
	names, err := ask(ctx, c)
	if err != nil {
		return nil
	}
	return names
}

func joinClose(err *error, c io.Closer) { *err = errors.Join(*err, c.Close()) }
