// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/gpuckpt/gpuckpt/bench/report"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/registryserver"
)

// transfer makes a run with a registry.
func (i *imageCase) transfer(ctx context.Context, o report.ImageOutcome) report.ImageOutcome {
	r := report.RegistryRun{ImageOutcome: o}
	i.once(ctx, &r.ImageOutcome, func(ctx context.Context) error { return i.thereAndBack(ctx, &r) })
	if r.Verified {
		i.b.logf("%s: push %s, of a second checkpoint %s with %.1f %% of the GPU state there, pull %s, resume %s, verified",
			r.Name(), report.Seconds(r.First.Push), report.Seconds(r.Second.Push), 100*r.Second.PushedShare(), report.Seconds(r.Pull), report.Seconds(r.Resume))
	}
	if ctx.Err() == nil { // else it was broken off
		i.transfers = append(i.transfers, r)
	}
	return r.ImageOutcome
}

func (i *imageCase) thereAndBack(ctx context.Context, r *report.RegistryRun) (err error) {
	server, err := registryserver.Start(i.b.dirs[report.OnTmpfs]) // which is no limit
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	s, err := i.start(ctx, report.Ours)
	if err != nil {
		return err
	}
	first, second := server.Ref("job:1"), server.Ref("job:2")
	if err := i.send(ctx, server, s.k, first, &r.First); err != nil {
		return err
	}
	if err := answers(ctx, s.k, fmt.Sprintf("write %d", report.RewrittenPermille), fmt.Sprintf("wrote %d", report.RewrittenPermille)); err != nil {
		return err
	}
	if err := i.send(ctx, server, s.k, second, &r.Second, "--previous", first); err != nil {
		return err
	}
	if err := answers(ctx, s.k, "verify", "bad=0"); err != nil {
		return fmt.Errorf("after the checkpoints: %w", err)
	}
	found, err := i.inspect(ctx, second)
	if err != nil {
		return err
	}
	r.LayerBytes = found.LayerBytes
	if r.Alone, err = server.Rate(ctx, found); err != nil {
		return err
	}
	if err := i.pullNext(ctx, first, second, r); err != nil {
		return err
	}
	if err := errors.Join(s.remove(ctx), i.c.ForgetImages(ctx)); err != nil {
		return err
	}
	if r.Arrivals, err = i.arrive(ctx, server, second, s.workload.port); err != nil {
		return err
	}
	var pulled harness.TransferAnswer
	r.Pull, err = timed(func() error {
		return i.c.Gpuckpt(ctx, &pulled, "image", "pull", second, "--snapshotter", i.c.Snapshotter())
	})
	if err != nil {
		return err
	}
	r.Fetched = pulled.MovedBytes
	r.Resume, err = i.resume(ctx, second, s.workload.port)
	return err
}

// send makes an image of a container that runs on, and pushes it.
func (i *imageCase) send(ctx context.Context, server *registryserver.Server, k *harness.Container, ref string, s *report.SentImage, flags ...string) (err error) {
	var made harness.CheckpointAnswer
	s.Checkpoint, err = timed(func() error {
		return i.c.Gpuckpt(ctx, &made, append([]string{"checkpoint", k.ID, "--image", ref, "--leave-running"}, flags...)...)
	})
	if err != nil {
		return err
	}
	s.Paused, s.Bytes, s.Written = made.PausedSeconds, made.Bytes, made.WrittenBytes
	s.GPUWritten, s.GPUReused = made.GPUWrittenBytes, made.GPUReusedBytes
	var pushed harness.TransferAnswer
	before := server.Received()
	s.Push, err = timed(func() error { return i.c.Gpuckpt(ctx, &pushed, "image", "push", ref) })
	if err != nil {
		return err
	}
	s.Sent, s.PushGPU, s.PushGPUReused = server.Received()-before, pushed.GPUBytes, pushed.GPUReusedBytes
	return nil
}

// inspect looks at an image.
func (i *imageCase) inspect(ctx context.Context, ref string) (*oci.Image, error) {
	image, err := i.c.Client().ImageService().Get(ctx, ref)
	if err != nil {
		return nil, fmt.Errorf("look at the image %s: %w", ref, err)
	}
	return oci.Inspect(ctx, i.c.Client().ContentStore(), image.Target)
}

// pullNext pulls the second image into a containerd that has the first, and nothing of the second
// but what both have.
func (i *imageCase) pullNext(ctx context.Context, first, second string, r *report.RegistryRun) (err error) {
	if err := i.c.ForgetImages(ctx); err != nil {
		return err
	}
	var pulled harness.TransferAnswer
	pull := func(ref string) error {
		return i.c.Gpuckpt(ctx, &pulled, "image", "pull", ref, "--snapshotter", i.c.Snapshotter())
	}
	if err := pull(first); err != nil {
		return err
	}
	r.NextPull, err = timed(func() error { return pull(second) })
	r.NextFetched = pulled.MovedBytes
	return err
}
