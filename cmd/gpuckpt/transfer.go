// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/convert"
	"github.com/gpuckpt/gpuckpt/images/localstore"
	"github.com/gpuckpt/gpuckpt/images/registry"
	"github.com/gpuckpt/gpuckpt/internal/cli/encryption"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
)

type transferFlags struct {
	daemon
	registry.Options
}

func (t *transferFlags) flags(c *cobra.Command) {
	t.daemon.flags(c)
	registryFlags(c, &t.Options)
}

// registryFlags adds the flags of commands that talk to a registry.
func registryFlags(c *cobra.Command, t *registry.Options) {
	f := c.Flags()
	f.StringVar(&t.HostsDir, "hosts-dir", registry.DefaultHostsDir, "containerd's directory of registries (hosts.toml)")
	f.BoolVar(&t.PlainHTTP, "plain-http", false, "talk HTTP; a registry on a loopback address may do so without")
	f.IntVar(&t.Parallel, "parallel", 0, "blobs that move at once (default: as many as processors, 4 to 16)")
	f.IntVar(&t.Attempts, "attempts", registry.DefaultAttempts, "how often a blob is tried")
	_ = c.MarkFlagDirname("hosts-dir")
}

type transferAnswer struct {
	Image  string        `json:"image"`
	Digest digest.Digest `json:"digest"`
	*registry.Result
	Seconds float64 `json:"seconds"`
}

// transfer answers with what move moved of the image name; verb words it.
func (t *transferFlags) transfer(cmd *cobra.Command, name, verb string, move func(context.Context, convert.Dial, *transferAnswer) error) error {
	if err := localstore.CheckName(name); err != nil {
		return err
	}
	return t.run(cmd, func(ctx context.Context, dial convert.Dial, progress images.Progress) (any, string, error) {
		began, a := time.Now(), &transferAnswer{Image: name}
		t.Progress = progress
		if err := move(ctx, dial, a); err != nil {
			return nil, "", err
		}
		a.Seconds = time.Since(began).Seconds()
		return a, a.words(verb), nil
	})
}

// words says what was moved.
func (a *transferAnswer) words(verb string) string {
	return fmt.Sprintf("%s@%s\n%s %s of %s, %s reused; %.2f s\n",
		strings.TrimSuffix(a.Image, "@"+a.Digest.String()), a.Digest, size(a.Moved), verb, size(a.Bytes), size(a.Reused), a.Seconds)
}

// sendImage sends what is in a place to the registry that the answer's image names.
func sendImage(ctx context.Context, dial convert.Dial, from string, a *transferAnswer, recipients []string, o registry.Options) (err error) {
	src, err := openPlace(ctx, dial, from)
	if err != nil {
		return err
	}
	defer joinClose(&err, src)
	if src.Image == nil {
		return fmt.Errorf("push %s: %w: make a checkpoint image of it first: gpuckpt image convert", from, registry.ErrNotPushable)
	}
	if a.Digest, a.Result, err = encryption.Push(ctx, src, a.Image, recipients, o); err != nil {
		return fmt.Errorf("push %s: %w", a.Image, err)
	}
	return nil
}

func encryptFlag(c *cobra.Command, recipients *[]string) {
	c.Flags().StringSliceVar(recipients, "encrypt", nil, "file or directory of public keys or certificates that the checkpoint is encrypted for (default: [encryption] recipients)")
	_ = c.MarkFlagFilename("encrypt")
}

func pushCommand() *cobra.Command {
	var t transferFlags
	var recipients []string
	c := &cobra.Command{
		Use:   "push REF [TARGET]",
		Short: "Send an image to a registry, optionally encrypted",
		Long: `Send an image to the registry in its name, or in TARGET. Blobs that the registry has
are not sent again: those of the last checkpoint, and those of an interrupted push.
The credentials are those of "docker login".

With --encrypt, or [encryption] recipients in ` + config.Path + `, the layers that the
checkpoint added are encrypted for those keys. They are other blobs each time: none of
them is found in the registry. They are kept in $TMPDIR, or /var/tmp, meanwhile.`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			target := strings.TrimPrefix(args[len(args)-1], convert.InContainerd+":")
			return t.transfer(cmd, target, "sent", func(ctx context.Context, dial convert.Dial, a *transferAnswer) error {
				return sendImage(ctx, dial, args[0], a, recipients, t.Options)
			})
		},
	}
	c.ValidArgsFunction = t.images
	t.flags(c)
	encryptFlag(c, &recipients)
	return c
}

// there fails unless each file of keys that a flag names is there: of a node's settings none needs to be.
func there(files []string) error {
	for _, file := range files {
		if _, err := os.Stat(strings.TrimPrefix(strings.TrimPrefix(file, "jwe:"), "pkcs7:")); err != nil { // see crypt.ReadKeys
			return err
		}
	}
	return nil
}

func pullCommand() *cobra.Command {
	var t transferFlags
	var snapshotter string
	var noUnpack bool
	var keys []string
	c := &cobra.Command{
		Use:   "pull REF",
		Short: "Fetch an image from a registry into containerd and unpack it",
		Long: `Fetch an image from a registry into containerd and unpack it. For a day, a pull
continues with the blobs that an interrupted one lacks. The credentials are those of
"docker login".

An encrypted checkpoint is decrypted with --decrypt-key, or with a key in
` + config.DecryptionKeys + `. Without any key that is left to containerd.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := there(keys); err != nil {
				return err
			}
			return t.transfer(cmd, args[0], "fetched", func(ctx context.Context, dial convert.Dial, a *transferAnswer) error {
				c, err := dial()
				if err != nil {
					return err
				}
				if !noUnpack {
					if snapshotter, err = t.snapshotter(ctx, c, snapshotter); err != nil {
						return err
					}
				}
				image, result, err := encryption.Pull(ctx, c, args[0], snapshotter, keys, t.Options)
				if err != nil {
					return err
				}
				a.Digest, a.Result = image.Target().Digest, result
				return nil
			})
		},
	}
	c.ValidArgsFunction = first(t.images)
	t.flags(c)
	c.Flags().StringVar(&snapshotter, "snapshotter", "", "containerd snapshotter to unpack with (default: that of containerd's namespace)")
	c.Flags().StringSliceVar(&keys, "decrypt-key", nil, "file or directory of private keys that decrypt the image (default: "+config.DecryptionKeys+")")
	_ = c.MarkFlagFilename("decrypt-key")
	c.Flags().BoolVar(&noUnpack, "no-unpack", false, "leave unpacking to whoever runs the image")
	c.MarkFlagsMutuallyExclusive("snapshotter", "no-unpack")
	return c
}
