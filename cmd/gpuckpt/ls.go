// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/docker/go-units"
	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/catalog"
	"github.com/gpuckpt/gpuckpt/images/convert"
	"github.com/gpuckpt/gpuckpt/internal/guard/trust"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/visible"
)

func lsCommand() *cobra.Command {
	var d daemon
	c := &cobra.Command{
		Use:   "ls [PREFIX]",
		Short: "List the checkpoint images in containerd",
		Long: `List the checkpoint images in containerd, the newest first; with PREFIX those whose names begin so.
Of each it shows the container, the time, and the size of what it adds to its base image. It also
shows the key that signed it, if this node trusts that.`,
		Example: `  gpuckpt ls
  gpuckpt ls --namespace k8s.io --json`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return d.run(cmd, func(ctx context.Context, dial convert.Dial, _ images.Progress) (any, string, error) {
				_, found, err := d.shelf(ctx, dial, strings.Join(args, ""))
				return found, lsText(found, time.Now()), err
			})
		},
	}
	d.answerFlags(c)
	return c
}

// shelf returns the checkpoint images in containerd whose names begin so.
func (d *daemon) shelf(ctx context.Context, dial convert.Dial, prefix string) (*client.Client, []catalog.Entry, error) {
	node, err := config.Load()
	if err != nil {
		return nil, nil, err
	}
	keys, err := trust.Keys(node)
	if err != nil {
		return nil, nil, err
	}
	c, err := dial()
	if err != nil {
		return nil, nil, err
	}
	found, err := catalog.List(ctx, c, prefix, keys)
	if found == nil {
		found = []catalog.Entry{} // for JSON
	}
	return c, found, err
}

func lsText(found []catalog.Entry, now time.Time) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "IMAGE\tCONTAINER\tCREATED\tSIZE\tGPU STATE\tSIGNED BY")
	for _, e := range found {
		by := cmp.Or(e.SignedBy, "nobody")
		if e.Signed && e.SignedBy == "" {
			by = "a key that is not trusted here"
		}
		fmt.Fprintf(w, "%s\t%s\t%s ago\t%s\t%s\t%s\n", visible.Text(e.Image), visible.Text(cmp.Or(e.Container, "-")), units.HumanDuration(now.Sub(e.Created)), size(e.Bytes), size(e.GPUBytes), by)
	}
	_ = w.Flush() // into memory
	return b.String()
}

// removed is what rm and prune print.
type removed struct {
	Removed []string `json:"removed"`
	// DryRun is whether they would have been.
	DryRun bool `json:"dryRun,omitempty"`
}

func (r removed) words() string {
	if len(r.Removed) == 0 {
		return ""
	}
	return strings.Join(r.Removed, "\n") + "\n"
}

func rmCommand() *cobra.Command {
	var d daemon
	c := &cobra.Command{
		Use:   "rm REF...",
		Short: "Remove checkpoint images from containerd",
		Long: `Remove checkpoint images from containerd, and the layers that no other image needs. An image that
is no checkpoint is refused.`,
		Example: `  gpuckpt rm example.com/job:1 example.com/job:2`,
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return d.run(cmd, func(ctx context.Context, dial convert.Dial, _ images.Progress) (any, string, error) {
				c, err := dial()
				if err != nil {
					return nil, "", err
				}
				r, err := remove(ctx, c, args)
				return r, r.words(), err
			})
		},
	}
	c.ValidArgsFunction = d.images
	d.answerFlags(c)
	return c
}

// remove goes on after an error, and joins all.
func remove(ctx context.Context, c *client.Client, names []string) (r removed, err error) {
	r.Removed = []string{}
	for _, name := range names {
		if rerr := catalog.Remove(ctx, c, name); rerr != nil {
			err = errors.Join(err, rerr)
			continue
		}
		r.Removed = append(r.Removed, name)
	}
	return r, err
}

func pruneCommand() *cobra.Command {
	var d daemon
	var rules catalog.Rules
	var dry bool
	c := &cobra.Command{
		Use:   "prune",
		Short: "Remove old checkpoint images from containerd",
		Long: `Remove old checkpoint images from containerd.

--keep spares the newest of each container in each repository, --older-than the younger ones; with
both, what either spares stays. An image that a container was made of stays. Images in registries
are not touched.`,
		Example: `  gpuckpt prune --keep 3
  gpuckpt prune --older-than 72h --container job --dry-run`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if rules.Keep < 0 || rules.OlderThan < 0 {
				return errors.New("--keep and --older-than cannot be negative")
			}
			return d.run(cmd, func(ctx context.Context, dial convert.Dial, _ images.Progress) (any, string, error) {
				c, found, err := d.shelf(ctx, dial, "")
				if err != nil {
					return nil, "", err
				}
				names := []string{}
				for _, e := range rules.Obsolete(found, time.Now()) {
					names = append(names, e.Image)
				}
				if dry {
					r := removed{names, true}
					return r, r.words(), nil
				}
				r, err := remove(ctx, c, names)
				return r, r.words(), err
			})
		},
	}
	d.answerFlags(c)
	f := c.Flags()
	f.IntVar(&rules.Keep, "keep", 0, "how many of each container's checkpoints in a repository stay, the newest")
	f.DurationVar(&rules.OlderThan, "older-than", 0, "remove only what is older, such as 72h")
	f.StringVar(&rules.Container, "container", "", "only the checkpoints of this container")
	f.BoolVar(&dry, "dry-run", false, "print what would be removed, and remove nothing")
	c.MarkFlagsOneRequired("keep", "older-than")
	return c
}
