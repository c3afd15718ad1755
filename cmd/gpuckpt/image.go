// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/convert"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/images/sign"
	"github.com/gpuckpt/gpuckpt/internal/criu/pages"
	"github.com/gpuckpt/gpuckpt/internal/guard/trust"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
)

const places = `A PLACE is
  containerd:REF                an image in containerd; a bare REF is one too
  oci:DIR[@REF]                 an OCI layout; @REF names one of several images
  oci-archive:FILE[@REF]        an OCI layout in a tar archive
  kubernetes-archive:FILE       what the kubelet keeps in /var/lib/kubelet/checkpoints
  dir:DIR                       a dump
A bare path (/… or ./…) that exists needs no kind before it.`

func imageCommand() *cobra.Command {
	return group(&cobra.Command{Use: "image", Short: "Build, look at, sign, verify, move and convert checkpoint images"},
		buildCommand(), convertCommand(), signCommand(), inspectCommand(), verifyCommand(), pushCommand(), pullCommand())
}

func buildCommand() *cobra.Command {
	return conversionCommand(true, &cobra.Command{
		Use:   "build SOURCE REF",
		Short: "Build a checkpoint image from a dump, containerd's own checkpoint or a Kubernetes archive",
		Long: `Build a checkpoint image from a dump, containerd's own checkpoint or a Kubernetes
archive. REF is the image's name in containerd, or another PLACE for it.

` + places,
	})
}

func convertCommand() *cobra.Command {
	return conversionCommand(false, &cobra.Command{
		Use:   "convert SOURCE DESTINATION",
		Short: "Convert a checkpoint between containerd, OCI layouts and archives, and Kubernetes archives",
		Long: `Convert a checkpoint. SOURCE is any PLACE, DESTINATION any but a dump. A file that
does not exist yet needs its kind before it. A checkpoint image is copied and keeps
its digest. Anything else is built into a checkpoint image.

` + places,
	})
}

// conversionCommand completes a command that takes a checkpoint from one place to another.
func conversionCommand(build bool, c *cobra.Command) *cobra.Command {
	var d daemon
	var b buildFlags
	v := convert.Options{MustBuild: build}
	c.Args = cobra.ExactArgs(2)
	c.RunE = func(cmd *cobra.Command, args []string) error { return d.convert(cmd, args, b, v) }
	c.ValidArgsFunction = d.images
	d.flags(c)
	b.flags(c, d.images)
	c.Flags().StringVar(&v.Base, "base", "", "the image that the container was made from (default: as the source says)")
	_ = c.RegisterFlagCompletionFunc("base", d.images)
	return c
}

func (d *daemon) convert(cmd *cobra.Command, args []string, b buildFlags, o convert.Options) (err error) {
	if o.Build, err = b.options(); err != nil {
		return err
	}
	o.Previous = b.previous
	from, err := convert.ParseRef(args[0])
	if err != nil {
		return err
	}
	to, err := convert.ParseRef(args[1])
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w; to make it, write its kind: %s:%s", err, convert.InOCIArchive, args[1])
	}
	if err != nil {
		return err
	}
	return d.run(cmd, func(ctx context.Context, dial convert.Dial, progress images.Progress) (any, string, error) {
		o.Dial, o.Progress = dial, progress
		made, err := convert.Convert(ctx, from, to, o)
		if err != nil {
			return nil, "", err
		}
		words := made.Destination
		if made.Digest != "" {
			words += "@" + made.Digest
		}
		if made.Built {
			words += fmt.Sprintf("\n%s of GPU state; layers of %s, %s of it reused", size(made.GPUBytes), size(made.Bytes), size(made.Reused))
		}
		return made, words + "\n", nil
	})
}

// verifyAnswer is what "image verify" prints, without Layers of a source that is no image.
type verifyAnswer struct {
	Source string `json:"source"`
	*oci.Report
	// Manifest is the digest of the seal's manifest, empty without one; SignedBy the id of
	// a trusted key.
	Manifest string `json:"manifest,omitempty"`
	SignedBy string `json:"signedBy,omitempty"`
}

func verifyCommand() *cobra.Command {
	var d daemon
	var keyFiles []string
	c := &cobra.Command{
		Use:   "verify PLACE",
		Short: "Read every byte of a checkpoint and show what is damaged, and who signed it",
		Long: `Read every byte of a checkpoint and show what is damaged: which layer, which file,
which block of GPU state. Show whether a key that this node trusts has signed it, or
with --key, fail unless one of those keys has.

` + places,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := there(keyFiles); err != nil {
				return err
			}
			return d.run(cmd, func(ctx context.Context, dial convert.Dial, progress images.Progress) (_ any, _ string, err error) {
				s, err := openPlace(ctx, dial, args[0])
				if err != nil {
					return nil, "", err
				}
				defer joinClose(&err, s)
				r, err := s.Verify(ctx, progress)
				if err != nil {
					return nil, "", fmt.Errorf("verify %s: %w", args[0], err)
				}
				answer := verifyAnswer{Source: s.Ref.String(), Report: r}
				signed, err := answer.whose(keyFiles)
				if err != nil {
					return nil, "", fmt.Errorf("verify %s: %w", args[0], err)
				}
				return answer, fmt.Sprintf("%s is whole: %d layers, %s; %d blocks of GPU state, %s\n%s\n",
					s.Ref, r.Layers, size(r.Bytes), r.Blocks, size(r.GPUBytes), signed), nil
			})
		},
	}
	c.ValidArgsFunction = first(d.images)
	d.flags(c)
	c.Flags().StringSliceVar(&keyFiles, "key", nil, "file or directory of public keys: fail unless one of them has signed it")
	_ = c.MarkFlagFilename("key")
	return c
}

// whose looks for a key that has signed the checkpoint, and words what it found.
func (a *verifyAnswer) whose(keyFiles []string) (string, error) {
	keys, err := sign.ReadKeys(keyFiles...)
	if err == nil && keyFiles == nil {
		var node config.Node
		if node, err = config.Load(); err == nil {
			keys, err = trust.Keys(node)
		}
	}
	if err != nil {
		return "", err
	}
	if a.Seal == nil || len(a.Seal.Signatures) == 0 {
		if keyFiles != nil {
			return "", sign.ErrUnsigned
		}
		return "it is not signed", nil
	}
	a.Manifest = sign.Digest(a.Seal.Manifest)
	words := "its manifest is " + a.Manifest
	key, err := a.Seal.SignedBy(keys)
	switch {
	case err == nil:
		a.SignedBy = key.ID()
		return fmt.Sprintf("%s, signed with the key %s of %s", words, key.ID(), key.Name), nil
	case keyFiles != nil:
		return "", err
	}
	return words + ", signed with no key that is trusted here", nil
}

type buildFlags struct {
	compression string
	level       int
	previous    string
}

// flags adds them; images completes the names of images.
func (b *buildFlags) flags(c *cobra.Command, images completion) {
	f := c.Flags()
	f.StringVar(&b.compression, "compression", "", "compression of layers, which then have GPU state too: zstd or gzip; none has all as it is (default: zstd for writable files, and for all without GPU state)")
	f.IntVar(&b.level, "level", 0, "compression level as the zstd or gzip program counts (0: the fastest)")
	f.StringVar(&b.previous, "previous", "", "an earlier checkpoint image of the container: what has not changed is not stored again")
	_ = c.RegisterFlagCompletionFunc("compression", cobra.FixedCompletions([]string{string(oci.Zstd), string(oci.Gzip), string(oci.None)}, cobra.ShellCompDirectiveNoFileComp))
	_ = c.RegisterFlagCompletionFunc("previous", images)
}

// options returns the flags, checked, as the package oci takes them.
func (b *buildFlags) options() (o oci.Options, err error) {
	o = oci.Options{Compression: oci.Compression(b.compression), Level: b.level, Memory: func(dir string) ([]string, error) {
		return pages.Chosen(dir, config.Default().LargeMemory())
	}}
	return o, o.Check()
}
