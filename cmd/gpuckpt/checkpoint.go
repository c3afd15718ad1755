// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/gpuckpt/gpuckpt/images/oci"
)

const (
	// dumpDirEnv names the directory for dumps in place of dumpDir.
	dumpDirEnv = "GPUCKPT_IMAGE_PATH"
	dumpDir    = "/var/lib/gpuckpt/checkpoints"
	// dumpPrefix begins the names of the dumps' own directories. containerd's
	// begin so, and by it the shim knows a directory that is gone when the client
	// has given up.
	dumpPrefix = "ctrd-checkpoint-gpuckpt-"
	// backLimit bounds each step of the way back, and the end of a container:
	// a resume waits until the shim has undone a dump and filled the GPUs.
	backLimit = 30 * time.Minute
	// leaseLimit is when containerd collects what was left by a command that was
	// killed.
	leaseLimit = 24 * time.Hour
)

// checkpointOptions are the flags of "gpuckpt checkpoint".
type checkpointOptions struct {
	daemon
	buildFlags
	ref          string
	dir          string
	leaveRunning bool
	unpack       bool
}

// checkpointAnswer is what it prints.
type checkpointAnswer struct {
	Container string `json:"container"`
	Image     string `json:"image"`
	Digest    string `json:"digest"`
	// Running says whether the container runs on.
	Running bool `json:"running"`
	// GPUBytes is the GPU state; Bytes, WrittenBytes and ReusedBytes what the
	// layers of the checkpoint have as they are stored, and how much of it was new.
	GPUBytes       uint64  `json:"gpuBytes"`
	Bytes          uint64  `json:"bytes"`
	WrittenBytes   uint64  `json:"writtenBytes"`
	ReusedBytes    uint64  `json:"reusedBytes"`
	GPUWritten     uint64  `json:"gpuWrittenBytes"`
	GPUReused      uint64  `json:"gpuReusedBytes"`
	PausedSeconds  float64 `json:"pausedSeconds"` // until it ran on, or had ended
	DumpSeconds    float64 `json:"dumpSeconds"`
	BuildSeconds   float64 `json:"buildSeconds"`
	UnpackSeconds  float64 `json:"unpackSeconds,omitempty"`
	SecondsOverall float64 `json:"seconds"`
}

func checkpointCommand() *cobra.Command {
	var o checkpointOptions
	c := &cobra.Command{
		Use:   "checkpoint CONTAINER --image REF",
		Short: "Make a checkpoint image of a running container",
		Long: `Make a checkpoint image of a running container.

The container is paused, dumped into a directory, and the image is made of that in
containerd. With --leave-running it runs on as soon as the dump is complete and its
GPU filled again; otherwise it is ended, once the image is complete. If anything fails the container is as it
was before, and there is no image.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			answer, err := o.run(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return o.print(cmd.OutOrStdout(), answer, answer.words)
		},
	}
	c.ValidArgsFunction = first(o.containers)
	o.daemon.flags(c)
	o.buildFlags.flags(c, o.images)
	f := c.Flags()
	f.StringVarP(&o.ref, "image", "i", "", "name of the image, example.com/job:1 (needed)")
	f.BoolVar(&o.leaveRunning, "leave-running", false, "let the container run on, as soon as the dump is complete and its GPU filled again")
	f.BoolVar(&o.unpack, "unpack", false, "unpack the image as well, so that whoever runs it on this node need not")
	f.StringVar(&o.dir, "image-path", cmp.Or(os.Getenv(dumpDirEnv), dumpDir),
		"directory on this node in which the dump is made, in one of its own; a tmpfs is fastest ($"+dumpDirEnv+")")
	_ = c.MarkFlagRequired("image")
	_ = c.RegisterFlagCompletionFunc("image", o.images)
	_ = c.MarkFlagDirname("image-path")
	return c
}

func (a *checkpointAnswer) words(w io.Writer) error {
	state := "the container has ended"
	if a.Running {
		state = fmt.Sprintf("the container runs on, it was paused for %.2f s", a.PausedSeconds)
	}
	_, err := fmt.Fprintf(w, "%s@%s\n%s of GPU state; %s stored, of which %s were there already; %.2f s; %s\n",
		a.Image, a.Digest, size(a.GPUBytes), size(a.Bytes), size(a.ReusedBytes), a.SecondsOverall, state)
	return err
}

// checkpointRun is one checkpoint on its way.
type checkpointRun struct {
	*checkpointOptions
	client   *client.Client
	info     containers.Container
	task     client.Task
	progress *progress
	build    oci.Options
	dumpDir  string
	pausedAt time.Time // zero while the container is as we found it
	resumed  time.Duration
}

func (o *checkpointOptions) run(ctx context.Context, id string) (_ *checkpointAnswer, err error) {
	began := time.Now()
	if err := fullName(o.ref); err != nil {
		return nil, err
	}
	r := &checkpointRun{checkpointOptions: o}
	if r.build, err = o.options(); err != nil {
		return nil, err
	}
	ctx, r.client, err = o.connect(ctx)
	if err != nil {
		return nil, err
	}
	defer joinClose(&err, r.client)
	if err := r.prepare(ctx, id); err != nil {
		return nil, fmt.Errorf("checkpoint %s: %w", id, err)
	}
	// What is written belongs to nobody else until the image has its name.
	ctx, release, err := r.client.WithLease(ctx, leases.WithRandomID(), leases.WithExpiration(leaseLimit))
	if err != nil {
		return nil, fmt.Errorf("checkpoint %s: keep containerd from collecting the image: %w", id, err)
	}
	defer func() { err = errors.Join(err, release(context.WithoutCancel(ctx))) }()
	r.progress = o.progress()
	defer r.progress.wait()

	answer := &checkpointAnswer{Container: id, Image: o.ref, Running: o.leaveRunning}
	if err := r.take(ctx, answer); err != nil {
		return nil, fmt.Errorf("checkpoint %s: %w", id, err)
	}
	answer.SecondsOverall = time.Since(began).Seconds()
	return answer, nil
}

// take is the checkpoint, in order, with the way back of each step.
func (r *checkpointRun) take(ctx context.Context, answer *checkpointAnswer) (err error) {
	var release func() error
	if r.dumpDir, release, err = makeDumpDir(r.dir); err != nil {
		return fmt.Errorf("make the directory for the dump: %w", err)
	}
	defer func() { err = errors.Join(err, release()) }()

	if err := r.pause(ctx); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.resume(context.WithoutCancel(ctx)))
		}
	}()
	dump, err := r.dump(ctx)
	if err != nil {
		return err
	}
	// The image is made of the files while the shim gives the GPU back.
	var manifest ocispec.Descriptor
	var group errgroup.Group
	group.Go(func() error {
		err := dump.wait()
		answer.DumpSeconds = time.Since(dump.began).Seconds()
		if err == nil && r.leaveRunning {
			err = r.resume(ctx)
		}
		return err
	})
	began := time.Now()
	manifest, err = r.makeImage(ctx, answer)
	answer.BuildSeconds = time.Since(began).Seconds()
	stuck := group.Wait()
	if err != nil {
		return errors.Join(err, stuck)
	}
	answer.Digest = manifest.Digest.String()
	if err := tag(ctx, r.client, cimages.Image{Name: r.ref, Target: manifest}); err != nil {
		return errors.Join(err, stuck)
	}
	if stuck != nil {
		return fmt.Errorf("the image %s is complete, but the container did not go on: %w", r.ref, stuck)
	}
	if !r.leaveRunning {
		if err := r.kill(ctx); err != nil {
			return fmt.Errorf("the image %s is complete, but the container did not end: %w", r.ref, err)
		}
	}
	answer.PausedSeconds = r.resumed.Seconds()
	if r.unpack {
		began := time.Now()
		if err := r.unpackHere(ctx); err != nil {
			return fmt.Errorf("the image %s is complete, but: %w", r.ref, err)
		}
		answer.UnpackSeconds = time.Since(began).Seconds()
	}
	return nil
}

// unpackHere unpacks the image for the snapshotter of the container.
func (r *checkpointRun) unpackHere(ctx context.Context) error {
	found, err := r.image(ctx, r.client, r.ref)
	if err != nil {
		return err
	}
	return unpackImage(ctx, r.client, client.NewImage(r.client, found), cmp.Or(r.info.Snapshotter, "overlayfs"))
}

// pause freezes the container unless somebody has done that before.
func (r *checkpointRun) pause(ctx context.Context) error {
	status, err := r.task.Status(ctx)
	if err != nil {
		return err
	}
	if status.Status == client.Paused {
		return nil
	}
	r.pausedAt = time.Now()
	if err := r.task.Pause(ctx); err != nil {
		// It may have been paused all the same, when it is the client that gave up.
		if ctx.Err() == nil {
			r.pausedAt = time.Time{}
		}
		return errors.Join(fmt.Errorf("pause it: %w", err), r.resume(context.WithoutCancel(ctx)))
	}
	return nil
}

// resume undoes pause, once.
func (r *checkpointRun) resume(ctx context.Context) error {
	if r.pausedAt.IsZero() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, backLimit)
	defer cancel()
	if err := r.task.Resume(ctx); err != nil {
		return fmt.Errorf("let it run on (try `ctr tasks resume %s`): %w", r.task.ID(), err)
	}
	r.resumed = time.Since(r.pausedAt)
	r.pausedAt = time.Time{}
	return nil
}

// makeImage makes the image of the dump; it has no name yet.
func (r *checkpointRun) makeImage(ctx context.Context, answer *checkpointAnswer) (none ocispec.Descriptor, _ error) {
	var err error
	if r.build.Checkpoint, err = openDir(r.dumpDir); err != nil {
		return none, err
	}
	r.build.Annotations = criuAnnotations(r.info)
	store, done, err := r.blobStore(ctx, r.client, r.build.Base, r.progress)
	if err != nil {
		return none, err
	}
	result, err := r.progress.build(ctx, store, r.build)
	if err = errors.Join(err, done()); err != nil {
		return none, err
	}
	answer.GPUBytes, answer.Bytes = result.GPUBytes, result.Bytes
	answer.WrittenBytes, answer.ReusedBytes = result.Written, result.Reused
	answer.GPUWritten, answer.GPUReused = result.GPUWritten, result.GPUReused
	return result.Manifest, nil
}

// kill ends the container. It is frozen until then.
func (r *checkpointRun) kill(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), backLimit)
	defer cancel()
	exit, err := r.task.Wait(ctx)
	if err != nil {
		return err
	}
	if err := r.task.Kill(ctx, syscall.SIGKILL, client.WithKillAll); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	select {
	case <-exit:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if !r.pausedAt.IsZero() {
		r.resumed = time.Since(r.pausedAt)
		r.pausedAt = time.Time{}
	}
	return nil
}
