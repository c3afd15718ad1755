// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	ctdimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/platforms"
	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/localstore"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/internal/cli/doctor"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
)

type doctorOptions struct {
	daemon
	annotations bool
	image       string
}

func doctorCommand() *cobra.Command {
	var o doctorOptions
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Check what this node has and lacks for GPU checkpoints",
		Long: `Check what this node has for GPU checkpoints, what it lacks, and how to fix that.

It looks at what the shims of the running containerd would use, and changes
nothing. With --image it answers one question: can that checkpoint be restored
here?

The exit status is 1 if there is a failure. A warning is something that makes
checkpoints slower, or keeps some containers from them.`,
		Example: `  gpuckpt doctor
  gpuckpt doctor --image example.com/job:1`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	o.answerFlags(c)
	c.Flags().BoolVar(&o.annotations, "annotations", false, "print this node's facts as annotations, KEY=VALUE each")
	c.Flags().StringVar(&o.image, "image", "", "check only whether this checkpoint, an image in containerd or a directory, can be restored here")
	c.MarkFlagsMutuallyExclusive("annotations", "image")
	_ = c.RegisterFlagCompletionFunc("image", o.images)
	return c
}

func (o *doctorOptions) run(cmd *cobra.Command) error {
	ctx := cmd.Context()
	var r doctor.Report
	var n doctor.Node
	running, found := doctor.Find(o.address)
	if found == nil {
		n.Containerd, n.Env = running, running.Env
	}
	path, configured := configure(&n)
	gpus := doctor.AskDriver(ctx, &n)
	switch {
	case o.image != "":
		need, err := o.needs(ctx)
		if err != nil {
			return err
		}
		_, free := doctor.CheckMemory(&n, "")
		r.Add(doctor.Match(need, doctor.OfNode(gpus, free))...)
	case o.annotations:
		facts := doctor.OfNode(gpus, 0).Annotations()
		var text strings.Builder // for `kubectl annotate node`
		for _, key := range slices.Sorted(maps.Keys(facts)) {
			fmt.Fprintf(&text, "%s=%s\n", key, facts[key])
		}
		return o.print(cmd, facts, text.String())
	default:
		r.Add(doctor.CheckPrograms(ctx, &n, path, configured)...)
		daemonChecks, cdiDirs, root := doctor.CheckContainerd(ctx, &n, o.address, found)
		r.Add(daemonChecks...)
		r.Add(doctor.CheckRunc(ctx, &n)...)
		r.Add(doctor.CheckCRIU(ctx, &n)...)
		r.Add(doctor.CheckKernel(&n)...)
		r.Add(doctor.CheckCgroup(&n)...)
		r.Add(doctor.CheckDriver(&n, gpus)...)
		if len(cdiDirs) == 0 { // containerd's configuration names none
			cdiDirs = n.CDISpecDirs
		}
		r.Add(doctor.CheckCDI(&n, cdiDirs)...)
		memory, free := doctor.CheckMemory(&n, root)
		r.Add(memory...)
		if n.LogDir != "" { // it is unknown where the configuration cannot be read
			r.Add(doctor.CheckOperations(n.LogDir, time.Now()))
		}
		r.Annotations = doctor.OfNode(gpus, free).Annotations()
	}
	if err := o.print(cmd, &r, r.Text()); err != nil {
		return err
	}
	if r.Failures > 0 {
		return errors.New(r.Summary())
	}
	return nil
}

// configure reads the shims' configuration, and returns where it is and what is wrong with it.
func configure(n *doctor.Node) (path string, err error) {
	for _, kv := range n.Env {
		if v, ok := strings.CutPrefix(kv, config.Env+"="); ok {
			if err := os.Setenv(config.Env, v); err != nil {
				return v, err
			}
		}
	}
	path = cmp.Or(os.Getenv(config.Env), config.Path)
	node, err := config.Load()
	if err != nil {
		return path, err
	}
	n.DriverRoot, n.CDISpecDirs = node.DriverRoot, node.CDISpecDirs
	n.LogDir = node.LogDir
	n.CRIU, n.StagingLimit = node.CRIU.Path, uint64(node.Staging.MemoryLimit)
	return path, nil
}

// needs returns what a checkpoint needs, by gpuckpt.json in a directory or an image's annotations.
func (o *doctorOptions) needs(ctx context.Context) (need doctor.Facts, err error) {
	if st, serr := os.Stat(o.image); serr == nil && st.IsDir() {
		m, err := images.ReadMetadata(o.image)
		if err != nil {
			return need, fmt.Errorf("read the checkpoint %s: %w", filepath.Clean(o.image), err)
		}
		return doctor.FromAnnotations(oci.Facts(m))
	}
	ctx, c, err := o.connect(ctx)
	if err != nil {
		return need, err
	}
	defer joinClose(&err, c)
	image, err := localstore.Find(ctx, c, o.image)
	if err != nil {
		return need, err
	}
	manifest, err := ctdimages.Manifest(ctx, c.ContentStore(), image.Target, platforms.Default())
	if err != nil {
		_, other := oci.Outline(ctx, c.ContentStore(), image.Target)
		return need, fmt.Errorf("read the manifest of %s: %w", o.image, cmp.Or(other, err))
	}
	if need, err = doctor.FromAnnotations(manifest.Annotations); err != nil {
		err = fmt.Errorf("the image %s: %w", o.image, err)
	}
	return need, err
}
