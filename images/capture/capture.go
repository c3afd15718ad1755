// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package capture takes a checkpoint of a running container in containerd as an image.
//
// Container looks at all that can be wrong; pauses the container; has the shim dump it while
// containerd takes its writable files; builds the image while the shim gives the GPU back; names
// the image; lets the container run on, or ends it. If a step fails, those before it are undone.
//
// Containers does so with several, as those of a pod (Pod), in one cut: each step is taken for all
// before the next one begins, and undone for all if it fails for one.
package capture

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/convert"
	"github.com/gpuckpt/gpuckpt/images/localstore"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

const (
	// DefaultDir is where dumps are made. It need not exist.
	DefaultDir = "/var/lib/gpuckpt/checkpoints"
	// undoLimit bounds each undo, and the end of a container: a resume fills the GPUs.
	undoLimit = 30 * time.Minute
	// alreadyRuns is what runc's shim says when a resume was done whose answer was lost, or a pause was not
	// (runningState of cmd/containerd-shim-runc-v2/process).
	alreadyRuns = "cannot resume a running process"
)

// Options say how a checkpoint is taken.
type Options struct {
	// Dir is where the dump is made, on this machine; empty: DefaultDir.
	Dir string
	// InMemory is how much memory dumps may take, in bytes, at most three quarters of what is available:
	// on a tmpfs of their own, mounted in Dir. What has no room there is dumped into Dir itself, from the
	// beginning.
	InMemory uint64
	// LeaveRunning lets the container run on. Else it ends once the image is complete.
	LeaveRunning bool
	// Build says how the image is built: Compression, Level, Threads.
	Build oci.Options
	// WaitFor is a path in the container, "/run/ready". The checkpoint begins once something is there,
	// which the program makes when it is to be taken; empty: at once.
	WaitFor string
	// Progress receives the steps "dump" and "image".
	Progress images.Progress
}

// Result says what was made.
type Result struct {
	Container string `json:"container"`
	// Name is the container's name in its pod, if it is in one.
	Name   string `json:"name,omitempty"`
	Image  string `json:"image"`
	Digest string `json:"digest"`
	// Running reports whether the container runs on.
	Running bool `json:"running"`
	oci.Result
	PausedSeconds  float64 `json:"pausedSeconds"` // until it ran on, or had ended
	DumpSeconds    float64 `json:"dumpSeconds"`
	BuildSeconds   float64 `json:"buildSeconds"`
	SecondsOverall float64 `json:"seconds"`
}

type run struct {
	Options
	Target
	client   *client.Client
	info     containers.Container
	task     client.Task
	dumpDir  string
	release  func() error // of dumpDir
	memory   uint64       // of the tmpfs that dumpDir is to be, in bytes; 0 for none
	dumped   *runningDump // nil before its files are complete
	manifest ocispec.Descriptor
	began    time.Time // once what it waits for was there
	pausedAt time.Time // zero while the container is as it was found
	paused   time.Duration
	result   Result
}

// pause freezes the container, unless it is paused already.
func (r *run) pause(ctx context.Context) error {
	status, err := r.task.Status(ctx)
	if err != nil {
		return err
	}
	if status.Status == client.Paused {
		return nil
	}
	if err := r.note(ctx); err != nil {
		return err
	}
	r.pausedAt = time.Now()
	if err := r.task.Pause(ctx); err != nil {
		// When this client gave up, or the answer was lost, the container may be paused all the same.
		if ctx.Err() == nil && !errdefs.IsUnavailable(err) {
			r.pausedAt = time.Time{}
		}
		return errors.Join(fmt.Errorf("pause it: %w", err), r.resume(context.WithoutCancel(ctx)))
	}
	return nil
}

// resume undoes pause, once.
func (r *run) resume(ctx context.Context) error {
	if r.pausedAt.IsZero() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, undoLimit)
	defer cancel()
	err := localstore.Outlast(ctx, r.client, func() error { return r.task.Resume(ctx) })
	if err == nil || strings.Contains(err.Error(), alreadyRuns) {
		r.unpaused()
		return nil
	}
	if status, serr := r.task.Status(ctx); errdefs.IsNotFound(serr) || serr == nil && status.Status == client.Stopped {
		r.unpaused()
		return errors.New("the container has ended meanwhile")
	}
	return fmt.Errorf("let it run on (try `ctr tasks resume %s`): %w", r.task.ID(), err)
}

func (r *run) unpaused() {
	if !r.pausedAt.IsZero() {
		r.paused, r.pausedAt = time.Since(r.pausedAt), time.Time{}
	}
}

// build builds the image of the dump, without a name. The layers go straight into the directory of
// containerd's content store, if that is to be had.
func (r *run) build(ctx context.Context) (err error) {
	began := time.Now()
	if r.Build.Checkpoint, err = convert.OpenDump(r.dumpDir); err != nil {
		return err
	}
	r.Build.Annotations = annotations(r.info)
	r.Build.Progress = r.Progress
	store := r.client.ContentStore()
	if local, err := localstore.Of(ctx, r.client); err == nil {
		store = content.Store(local)
	} else {
		r.Progress.Begin("image", 0).Note(fmt.Sprintf("layers go through containerd's socket, which takes longer: %v", err))
	}
	var built *oci.Result
	if err := localstore.Outlast(ctx, r.client, func() (err error) {
		built, err = oci.Build(ctx, store, r.Build)
		return err
	}); err != nil {
		return err
	}
	r.manifest = built.Manifest
	r.result.Result, r.result.Digest, r.result.BuildSeconds = *built, built.Manifest.Digest.String(), time.Since(began).Seconds()
	return nil
}

// kill ends the container. It is frozen until then.
func (r *run) kill(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoLimit)
	defer cancel()
	return localstore.Outlast(ctx, r.client, func() error { return r.end(ctx) })
}

func (r *run) end(ctx context.Context) error {
	exit, err := r.task.Wait(ctx)
	if err != nil {
		return err
	}
	if err := r.task.Kill(ctx, syscall.SIGKILL, client.WithKillAll); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	select {
	case status := <-exit:
		if err := status.Error(); err != nil {
			return err
		}
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	r.unpaused()
	return nil
}
