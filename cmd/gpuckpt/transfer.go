// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/images/convert"
	"github.com/gpuckpt/gpuckpt/images/localstore"
	"github.com/gpuckpt/gpuckpt/images/registry"
)

// transferFlags are those of push and pull.
type transferFlags struct {
	daemon
	registry.Options
}

func (t *transferFlags) flags(c *cobra.Command) {
	t.daemon.flags(c)
	f := c.Flags()
	f.StringVar(&t.HostsDir, "hosts-dir", registry.DefaultHostsDir, "containerd's directory of registries (hosts.toml)")
	f.BoolVar(&t.PlainHTTP, "plain-http", false, "talk HTTP; a registry on a loopback address may do so without")
	f.IntVar(&t.Parallel, "parallel", registry.DefaultParallel, "blobs that move at once")
	f.IntVar(&t.Attempts, "attempts", registry.DefaultAttempts, "how often a blob is tried")
	_ = c.MarkFlagDirname("hosts-dir")
}

// transferAnswer is what push and pull print.
type transferAnswer struct {
	Image  string        `json:"image"`
	Digest digest.Digest `json:"digest"`
	*registry.Result
	Seconds float64 `json:"seconds"`
}

// run answers with what move moved; verb words it.
func (t *transferFlags) run(cmd *cobra.Command, verb string, move func(context.Context) (transferAnswer, error)) error {
	began := time.Now()
	shown := t.progress()
	defer shown.wait()
	t.Progress = shown.show
	a, err := move(cmd.Context())
	if err != nil {
		return err
	}
	a.Seconds = time.Since(began).Seconds()
	return t.print(cmd, a, fmt.Sprintf("%s@%s\n%s %s of %s, %s reused; %.2f s\n",
		a.Image, a.Digest, size(a.Moved), verb, size(a.Bytes), size(a.Reused), a.Seconds))
}

func pushCommand() *cobra.Command {
	var t transferFlags
	c := &cobra.Command{
		Use:   "push REF [TARGET]",
		Short: "Send an image to a registry",
		Long: `Send an image to the registry in its name, or in TARGET. Blobs that the registry has
are not sent again: those of the last checkpoint, and those of an interrupted push.
The credentials are those of "docker login".`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return t.run(cmd, "sent", func(ctx context.Context) (transferAnswer, error) { return t.push(ctx, args[0], args[len(args)-1]) })
		},
	}
	c.ValidArgsFunction = t.images
	t.flags(c)
	return c
}

func (t *transferFlags) push(ctx context.Context, ref, target string) (a transferAnswer, err error) {
	a.Image = strings.TrimPrefix(target, convert.InContainerd+":")
	if err := localstore.CheckName(a.Image); err != nil {
		return a, err
	}
	ctx, src, err := t.openPlace(ctx, ref)
	if err != nil {
		return a, err
	}
	defer joinClose(&err, src)
	if src.Image == nil {
		return a, fmt.Errorf("push %s: %w: make a checkpoint image of it first: gpuckpt image convert", ref, registry.ErrNotPushable)
	}
	a.Digest = src.Image.Digest
	a.Result, err = registry.Push(ctx, src.Provider, a.Image, *src.Image, t.Options)
	return a, err
}

func pullCommand() *cobra.Command {
	var t transferFlags
	var snapshotter string
	var noUnpack bool
	c := &cobra.Command{
		Use:   "pull REF",
		Short: "Fetch an image from a registry into containerd and unpack it",
		Long: `Fetch an image from a registry into containerd and unpack it. For a day, a pull
continues where an interrupted one ended. The credentials are those of
"docker login".`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return t.run(cmd, "fetched", func(ctx context.Context) (transferAnswer, error) { return t.pull(ctx, args[0], snapshotter, !noUnpack) })
		},
	}
	c.ValidArgsFunction = first(t.images)
	t.flags(c)
	c.Flags().StringVar(&snapshotter, "snapshotter", "", "containerd snapshotter to unpack with (default: that of containerd's namespace)")
	c.Flags().BoolVar(&noUnpack, "no-unpack", false, "leave unpacking to whoever runs the image")
	c.MarkFlagsMutuallyExclusive("snapshotter", "no-unpack")
	return c
}

// pull fetches an image, and unpacks it for a snapshotter if it is to.
func (t *transferFlags) pull(ctx context.Context, ref, snapshotter string, unpack bool) (a transferAnswer, err error) {
	a.Image = ref
	if err := localstore.CheckName(ref); err != nil {
		return a, err
	}
	ctx, c, err := t.connect(ctx)
	if err != nil {
		return a, err
	}
	defer joinClose(&err, c)
	if unpack {
		if snapshotter, err = t.snapshotter(ctx, c, snapshotter); err != nil {
			return a, err
		}
	}
	image, result, err := registry.Pull(ctx, c, ref, snapshotter, t.Options)
	if err != nil {
		return a, err
	}
	a.Digest, a.Result = image.Target().Digest, result
	return a, nil
}
