// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/docker/go-units"
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
	Image  string `json:"image"`
	Digest string `json:"digest"`
	*registry.Result
	Seconds float64 `json:"seconds"`
}

func (a *transferAnswer) words(verb string) func(io.Writer) error {
	return func(w io.Writer) error {
		_, err := fmt.Fprintf(w, "%s@%s\n%s %s of %s, %s reused; %.2f s\n",
			a.Image, a.Digest, units.BytesSize(float64(a.Moved)), verb, units.BytesSize(float64(a.Bytes)), units.BytesSize(float64(a.Reused)), a.Seconds)
		return err
	}
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
			answer, err := t.push(cmd.Context(), args[0], args[len(args)-1])
			if err != nil {
				return err
			}
			return t.print(cmd.OutOrStdout(), answer, answer.words("sent"))
		},
	}
	c.ValidArgsFunction = t.images
	t.flags(c)
	return c
}

func (t *transferFlags) push(ctx context.Context, ref, target string) (_ *transferAnswer, err error) {
	began := time.Now()
	target = strings.TrimPrefix(target, convert.InContainerd+":")
	if err := localstore.CheckName(target); err != nil {
		return nil, err
	}
	ctx, src, err := t.openPlace(ctx, ref)
	if err != nil {
		return nil, err
	}
	defer joinClose(&err, src)
	if src.Image == nil {
		return nil, fmt.Errorf("push %s: %w: make a checkpoint image of it first: gpuckpt image convert", ref, registry.ErrNotPushable)
	}
	shown := t.progress()
	defer shown.wait()
	t.Progress = shown.show
	result, err := registry.Push(ctx, src.Provider, target, *src.Image, t.Options)
	if err != nil {
		return nil, err
	}
	return &transferAnswer{Image: target, Digest: src.Image.Digest.String(), Result: result, Seconds: time.Since(began).Seconds()}, nil
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
			answer, err := t.pull(cmd.Context(), args[0], snapshotter, !noUnpack)
			if err != nil {
				return err
			}
			return t.print(cmd.OutOrStdout(), answer, answer.words("fetched"))
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
func (t *transferFlags) pull(ctx context.Context, ref, snapshotter string, unpack bool) (_ *transferAnswer, err error) {
	began := time.Now()
	if err := localstore.CheckName(ref); err != nil {
		return nil, err
	}
	ctx, c, err := t.connect(ctx)
	if err != nil {
		return nil, err
	}
	defer joinClose(&err, c)
	if unpack {
		snapshotter, err = t.snapshotter(ctx, c, snapshotter)
	} else {
		snapshotter = ""
	}
	if err != nil {
		return nil, err
	}
	shown := t.progress()
	defer shown.wait()
	t.Progress = shown.show
	image, result, err := registry.Pull(ctx, c, ref, snapshotter, t.Options)
	if err != nil {
		return nil, err
	}
	return &transferAnswer{Image: ref, Digest: image.Target().Digest.String(), Result: result, Seconds: time.Since(began).Seconds()}, nil
}
