// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/capture"
	"github.com/gpuckpt/gpuckpt/images/convert"
)

// dumpDirEnv names the directory for dumps in place of capture.DefaultDir.
const dumpDirEnv = "GPUCKPT_IMAGE_PATH"

func checkpointCommand() *cobra.Command {
	var d daemon
	var b buildFlags
	var o capture.Options
	c := &cobra.Command{
		Use:   "checkpoint CONTAINER --image REF",
		Short: "Make a checkpoint image of a running container",
		Long: `Make a checkpoint image of a running container.

The container is paused and dumped into a directory, and the image is built of the dump
in containerd. With --leave-running the container runs on as soon as the dump is complete
and its GPU filled again. Otherwise it ends once the image is complete. If anything fails,
the container is as it was before, and there is no image.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if o.Build, err = b.options(); err != nil {
				return err
			}
			return d.run(cmd, func(ctx context.Context, dial convert.Dial, progress images.Progress) (any, string, error) {
				client, err := dial()
				if err != nil {
					return nil, "", err
				}
				o.Previous, o.Progress = b.previous, progress
				made, err := capture.Container(ctx, client, args[0], o)
				if err != nil {
					return nil, "", err
				}
				state := "the container has ended"
				if made.Running {
					state = fmt.Sprintf("the container runs on, it was paused for %.2f s", made.PausedSeconds)
				}
				return made, fmt.Sprintf("%s@%s\n%s of GPU state; layers of %s, %s of it reused; %.2f s; %s\n",
					made.Image, made.Digest, size(made.GPUBytes), size(made.Bytes), size(made.Reused), made.SecondsOverall, state), nil
			})
		},
	}
	c.ValidArgsFunction = first(d.containers)
	d.flags(c)
	b.flags(c, d.images)
	f := c.Flags()
	f.StringVarP(&o.Image, "image", "i", "", "name of the image, example.com/job:1 (needed)")
	f.BoolVar(&o.LeaveRunning, "leave-running", false, "let the container run on, as soon as the dump is complete and its GPU filled again")
	f.BoolVar(&o.Unpack, "unpack", false, "unpack the image as well, so that whoever runs it on this node need not")
	f.StringVar(&o.Dir, "image-path", cmp.Or(os.Getenv(dumpDirEnv), capture.DefaultDir),
		"directory on this node in which the dump is made, in one of its own; a tmpfs is fastest ($"+dumpDirEnv+")")
	_ = c.MarkFlagRequired("image")
	_ = c.RegisterFlagCompletionFunc("image", d.images)
	_ = c.MarkFlagDirname("image-path")
	return c
}
