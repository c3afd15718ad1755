// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/convert"
	"github.com/gpuckpt/gpuckpt/images/sign"
	"github.com/gpuckpt/gpuckpt/internal/guard/trust"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
)

func keyCommand() *cobra.Command {
	show := &cobra.Command{
		Use:   "show",
		Short: "Print the public half of the key that signs this node's checkpoints",
		Long: `Print the public half of the key that signs this node's checkpoints, in PEM. The key is
made if there is none yet ([signing] key in ` + config.Path + `).

Other nodes restore this node's checkpoints once the output is a file NAME.pub in their
[restore] keys, /etc/gpuckpt/keys by default.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := nodeSigner()
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(s.Key.PEM())
			return err
		},
	}
	list := &cobra.Command{
		Use:   "list",
		Short: "List the keys that this node trusts",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			node, err := config.Load()
			if err != nil {
				return err
			}
			keys, err := trust.Keys(node)
			if err != nil {
				return err
			}
			if len(keys) == 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), `This node trusts no key: "gpuckpt key show" makes its own.`)
			}
			for _, k := range keys {
				fmt.Fprintf(cmd.OutOrStdout(), "%s  %s\n", k.ID(), k.Name)
			}
			return nil
		},
	}
	return group(&cobra.Command{Use: "key", Short: "Show the key that signs checkpoints here, and the keys that are trusted"}, show, list)
}

// nodeSigner returns the node's key, which it makes if there is none.
func nodeSigner() (*sign.Signer, error) {
	node, err := config.Load()
	if err != nil {
		return nil, err
	}
	if node.Signing.Key == "" {
		return nil, fmt.Errorf("this node has no key: [signing] key in %s is empty", config.Path)
	}
	return sign.ReadOrMakeSigner(node.Signing.Key)
}

func signCommand() *cobra.Command {
	var d daemon
	var b buildFlags
	var key, signature string
	var manifest bool
	c := &cobra.Command{
		Use:   "sign SOURCE [DESTINATION]",
		Short: "Sign a checkpoint, so that nodes that trust the key restore it",
		Long: `Sign a checkpoint, so that nodes that trust the key restore it. Who signs vouches for
all that is in it, like for a program that is to run as root on those nodes.

A dump is signed where it lies. Anything else is written to DESTINATION, in containerd by
another name than the image's own. --manifest prints what another program is to sign, --signature adds
what it has written:

  gpuckpt image sign --manifest PLACE >gpuckpt.manifest
  cosign sign-blob --key cosign.key --tlog-upload=false --output-signature job.sig gpuckpt.manifest
  gpuckpt image sign --signature job.sig PLACE DESTINATION

` + places,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if manifest {
				return d.printManifest(cmd, args[0])
			}
			from, err := convert.ParseRef(args[0])
			if err != nil {
				return err
			}
			if len(args) == 2 && args[1] == args[0] && from.Kind == convert.InContainerd {
				return errors.New("an image keeps its name: choose another one for DESTINATION")
			}
			sign, err := signWith(key, signature)
			if err != nil {
				return err
			}
			if len(args) == 2 {
				return d.convert(cmd, args, b, convert.Options{Sign: sign})
			}
			if from.Kind != convert.InDir {
				return errors.New("only a dump is signed where it lies: name a DESTINATION")
			}
			return d.run(cmd, func(ctx context.Context, _ convert.Dial, _ images.Progress) (any, string, error) {
				err := convert.SignDump(ctx, from.Path, sign)
				return map[string]string{"source": from.String()}, from.String() + " is signed\n", err
			})
		},
	}
	c.ValidArgsFunction = d.images
	d.flags(c)
	b.flags(c, d.images)
	f := c.Flags()
	f.StringVar(&key, "key", "", "file of the private key in PEM (default: this node's key)")
	f.StringVar(&signature, "signature", "", "add this file, a signature in base64, instead of making one")
	f.BoolVar(&manifest, "manifest", false, "print the manifest, and sign nothing")
	c.MarkFlagsMutuallyExclusive("key", "signature", "manifest")
	_ = c.MarkFlagFilename("key")
	_ = c.MarkFlagFilename("signature")
	return c
}

// signWith returns what makes a signature: a key, or a file that has it.
func signWith(key, signature string) (sign.Sign, error) {
	if signature == "" {
		if key == "" {
			s, err := nodeSigner()
			if err != nil {
				return nil, err
			}
			return s.Signature, nil
		}
		s, err := sign.ReadSigner(key)
		if err != nil {
			return nil, err
		}
		return s.Signature, nil
	}
	data, err := os.ReadFile(signature)
	if err != nil {
		return nil, err
	}
	name := strings.TrimSuffix(filepath.Base(signature), filepath.Ext(signature))
	return func([]byte) (string, []byte, error) { return sign.ManifestName + "." + name + ".sig", data, nil }, nil
}

// printManifest prints the manifest of a checkpoint, its own or one made for it.
func (d *daemon) printManifest(cmd *cobra.Command, place string) error {
	return d.run(cmd, func(ctx context.Context, dial convert.Dial, progress images.Progress) (_ any, _ string, err error) {
		s, err := openPlace(ctx, dial, place)
		if err != nil {
			return nil, "", err
		}
		defer joinClose(&err, s)
		files, err := s.Unpack(ctx, progress)
		if err != nil {
			return nil, "", err
		}
		defer joinClose(&err, files)
		_, manifest, err := sign.WithManifest(ctx, files.Files)
		return map[string]string{"manifest": string(manifest)}, string(manifest), err
	})
}
