// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

func imageCommand() *cobra.Command {
	group := &cobra.Command{
		Use:   "image",
		Short: "Build, look at, verify, move and convert checkpoint images",
		Args:  cobra.NoArgs, // so that an unknown sub-command is an error
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	group.AddCommand(buildCommand(), convertCommand(), inspectCommand(), verifyCommand(), pushCommand(), pullCommand())
	return group
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
		Long: `Convert a checkpoint. SOURCE is any PLACE, DESTINATION any but a dump; a file that
is to be made needs its kind written before it. A checkpoint image is copied as it
is, digest and all; what is none yet is built.

` + places,
	})
}

// conversionCommand completes a command that takes a checkpoint from one place to
// another; build refuses sources that are built already.
func conversionCommand(build bool, c *cobra.Command) *cobra.Command {
	var v conversion
	c.Args = cobra.ExactArgs(2)
	c.RunE = func(cmd *cobra.Command, args []string) error { return v.command(cmd, args, build) }
	c.ValidArgsFunction = v.images
	v.daemon.flags(c)
	v.buildFlags.flags(c, v.images)
	c.Flags().StringVar(&v.base, "base", "", "the image that the container was made from (default: as the source says)")
	_ = c.RegisterFlagCompletionFunc("base", v.images)
	return c
}

// command runs a conversion and prints what came of it.
func (v *conversion) command(cmd *cobra.Command, args []string, build bool) error {
	from, err := parsePlace(args[0])
	if err != nil {
		return err
	}
	to, err := parsePlace(args[1])
	if err != nil {
		return err
	}
	if to.kind == inDir {
		return fmt.Errorf("%s: a checkpoint cannot be written as a dump", args[1])
	}
	answer, err := v.run(cmd.Context(), from, to, build)
	if err != nil {
		return err
	}
	return v.print(cmd.OutOrStdout(), answer, answer.words)
}

// verifyAnswer is what "image verify" prints.
type verifyAnswer struct {
	Source string `json:"source"`
	// Layers and Bytes are those of an image, as stored; 0 for other sources.
	Layers int    `json:"layers,omitempty"`
	Bytes  uint64 `json:"bytes,omitempty"`
	// Blocks of GPU state, and its size.
	Blocks   int    `json:"blocks"`
	GPUBytes uint64 `json:"gpuBytes"`
}

func verifyCommand() *cobra.Command {
	var d daemon
	c := &cobra.Command{
		Use:   "verify PLACE",
		Short: "Read every byte of a checkpoint and say what is damaged",
		Long: `Read every byte of a checkpoint and say what is damaged: which layer, which file,
which block of GPU state.

` + places,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			s, err := d.openPlace(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			defer joinClose(&err, s)
			answer, err := d.verify(s)
			if err != nil {
				return fmt.Errorf("verify %s: %w", args[0], err)
			}
			return d.print(cmd.OutOrStdout(), answer, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s is whole: %d layers, %s; %d blocks of GPU state, %s\n",
					answer.Source, answer.Layers, size(answer.Bytes), answer.Blocks, size(answer.GPUBytes))
				return err
			})
		},
	}
	c.ValidArgsFunction = first(d.images)
	d.flags(c)
	return c
}

func (d *daemon) verify(s *openSource) (*verifyAnswer, error) {
	p := d.progress()
	defer p.wait()
	answer := &verifyAnswer{Source: s.place.String()}
	return answer, p.do("verify", "read", func(step *step) error {
		if s.image != nil {
			report, err := oci.Verify(s.ctx, s.provider, *s.image, step.set)
			if err != nil {
				return err
			}
			answer.Layers, answer.Bytes = report.Layers, report.Bytes
			answer.Blocks, answer.GPUBytes = report.Blocks, report.GPUBytes
			return nil
		}
		c := s.flat()
		if c.Metadata == nil {
			return nil
		}
		answer.GPUBytes = c.AreaBytes()
		for _, a := range c.Areas() {
			answer.Blocks += len(a.Digests)
		}
		return images.Check(s.ctx, c.Areas(), 0, func(n uint64) { step.add(int64(n), int64(answer.GPUBytes)) })
	})
}
