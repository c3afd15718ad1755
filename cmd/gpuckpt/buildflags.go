// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/images/oci"
)

// buildFlags are the flags of commands that make a checkpoint image.
type buildFlags struct {
	compression string
	level       int
	threads     int
	layer       string
	previous    string
}

// flags adds them; images completes the names of images.
func (b *buildFlags) flags(c *cobra.Command, images completion) {
	f := c.Flags()
	f.StringVar(&b.compression, "compression", string(oci.Zstd), "compression of the layers: zstd, gzip or none")
	f.IntVar(&b.level, "level", 0, "compression level as the zstd or gzip program counts (0: the fastest)")
	f.IntVar(&b.threads, "threads", 0, "layers made at once (0: one for each processor)")
	f.StringVar(&b.layer, "layer-size", "", "size of the pieces that GPU state is cut into, a layer each: a power of two, 64MiB or more (default: as --previous was cut, else by the state's size)")
	f.StringVar(&b.previous, "previous", "", "an earlier checkpoint image of the container: what has not changed is not stored again")
	_ = c.RegisterFlagCompletionFunc("compression", cobra.FixedCompletions([]string{string(oci.Zstd), string(oci.Gzip), string(oci.None)}, cobra.ShellCompDirectiveNoFileComp))
	_ = c.RegisterFlagCompletionFunc("previous", images)
}

// options returns the flags, checked, as the package oci takes them.
func (b *buildFlags) options() (o oci.Options, err error) {
	o = oci.Options{Compression: oci.Compression(b.compression), Level: b.level, Threads: b.threads}
	if b.layer != "" {
		n, err := units.RAMInBytes(b.layer)
		if err != nil || n <= 0 {
			return o, fmt.Errorf("--layer-size: %q is not a size such as 512MiB", b.layer)
		}
		o.LayerBytes = uint64(n)
	}
	return o, o.Check()
}
