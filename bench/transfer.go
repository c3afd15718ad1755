// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// registryRun is two checkpoints of a program that runs on, between which it
// writes to rewrittenPermille of its GPU memory; both are pushed to a registry,
// everything of them is removed here, and what comes back of the second resumes.
// Times are the client's, in seconds.
type registryRun struct {
	imageOutcome
	// LayerBytes is what the GPU state was cut into.
	LayerBytes uint64    `json:"layerBytes"`
	First      sentImage `json:"first"`
	Second     sentImage `json:"second"`
	// Pull is "gpuckpt image pull", which unpacks, and Fetched the bytes that it
	// says came over the wire.
	Pull    float64 `json:"pullSeconds"`
	Fetched uint64  `json:"fetchedBytes"`
	// Resume is ctr starting a container of the image.
	Resume float64 `json:"resumeSeconds"`
	// NextPull is the pull of the second image where the first is, and NextFetched what came over the
	// wire.
	NextPull    float64 `json:"nextPullSeconds,omitempty"`
	NextFetched uint64  `json:"nextFetchedBytes,omitempty"`
	// Alone is the registry's own rate, in bytes a second: all layers of GPU state are fetched without a
	// limit, over as many connections as gpuckpt has, and thrown away.
	Alone float64 `json:"aloneBytesPerSecond,omitempty"`
	// Arrivals are restores while the image arrives, at each of the rates asked for.
	Arrivals []arrivalRun `json:"arrivals"`
}

// sentImage is a checkpoint image on its way from the program to a registry.
type sentImage struct {
	// Checkpoint is "gpuckpt checkpoint --image --leave-running", and Paused how
	// long the program stood still in it.
	Checkpoint float64 `json:"checkpointSeconds"`
	Paused     float64 `json:"pausedSeconds"`
	// Bytes are those of the checkpoint's layers as stored, Written those that
	// were not in containerd.
	Bytes   uint64 `json:"bytes"`
	Written uint64 `json:"writtenBytes"`
	// GPUWritten and GPUReused are the GPU state's part of them, new and there
	// already.
	GPUWritten uint64 `json:"gpuWrittenBytes"`
	GPUReused  uint64 `json:"gpuReusedBytes"`
	// Push is "gpuckpt image push". Sent is what the registry got of blobs.
	Push float64 `json:"pushSeconds"`
	Sent uint64  `json:"sentBytes"`
	// PushGPU are the bytes of the layers of GPU state, PushGPUReused those that
	// were in the registry.
	PushGPU       uint64 `json:"pushGPUBytes"`
	PushGPUReused uint64 `json:"pushGPUReusedBytes"`
}

// builtShare is the share of the GPU state's bytes that were in containerd when
// the image was made, pushedShare that of those that were in the registry.
func (s sentImage) builtShare() float64 {
	return float64(s.GPUReused) / float64(max(1, s.GPUWritten+s.GPUReused))
}
func (s sentImage) pushedShare() float64 {
	return float64(s.PushGPUReused) / float64(max(1, s.PushGPU))
}

// rewrittenPermille is the share of its GPU memory that the program writes to
// between the checkpoints.
const rewrittenPermille = 10

// transfer makes a run with a registry.
func (i *imageCase) transfer(ctx context.Context, o imageOutcome) imageOutcome {
	r := registryRun{imageOutcome: o}
	i.once(ctx, &r.imageOutcome, func(ctx context.Context) error { return i.thereAndBack(ctx, &r) })
	if r.Verified {
		i.b.logf("%s: push %s, of a second checkpoint %s with %.1f %% of the GPU state there, pull %s, resume %s, verified",
			r.name(), seconds(r.First.Push), seconds(r.Second.Push), 100*r.Second.pushedShare(), seconds(r.Pull), seconds(r.Resume))
	}
	if ctx.Err() == nil { // else it was broken off
		i.transfers = append(i.transfers, r)
	}
	return r.imageOutcome
}

func (i *imageCase) thereAndBack(ctx context.Context, r *registryRun) (err error) {
	server, err := startRegistry(i.b.dirs[onTmpfs]) // which is no limit
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.close()) }()
	s, err := i.start(ctx, ours)
	if err != nil {
		return err
	}
	first, second := server.ref("job:1"), server.ref("job:2")
	if err := i.send(ctx, server, s.k, first, &r.First); err != nil {
		return err
	}
	if err := answers(ctx, s.k, fmt.Sprintf("write %d", rewrittenPermille), fmt.Sprintf("wrote %d", rewrittenPermille)); err != nil {
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
	if r.Alone, err = server.rate(ctx, found); err != nil {
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
func (i *imageCase) send(ctx context.Context, server *registryServer, k *harness.Container, ref string, s *sentImage, flags ...string) (err error) {
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
	before := server.sent()
	s.Push, err = timed(func() error { return i.c.Gpuckpt(ctx, &pushed, "image", "push", ref) })
	if err != nil {
		return err
	}
	s.Sent, s.PushGPU, s.PushGPUReused = server.sent()-before, pushed.GPUBytes, pushed.GPUReusedBytes
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
func (i *imageCase) pullNext(ctx context.Context, first, second string, r *registryRun) (err error) {
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
