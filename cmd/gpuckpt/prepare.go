// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images/oci"
)

// prepare looks at all that can be wrong before the container is touched.
func (r *checkpointRun) prepare(ctx context.Context, id string) error {
	container, err := r.client.LoadContainer(ctx, id)
	if errdefs.IsNotFound(err) {
		return fmt.Errorf("there is no such container in containerd's namespace %s: %w", r.namespace, errdefs.ErrNotFound)
	}
	if err != nil {
		return err
	}
	if r.info, err = container.Info(ctx, client.WithoutRefreshedMetadata); err != nil {
		return err
	}
	if r.task, err = container.Task(ctx, nil); err != nil {
		if errdefs.IsNotFound(err) {
			return fmt.Errorf("it has no task, so nothing runs in it: %w", errdefs.ErrFailedPrecondition)
		}
		return err
	}
	status, err := r.task.Status(ctx)
	if err != nil {
		return err
	}
	if status.Status != client.Running && status.Status != client.Paused {
		return fmt.Errorf("it is %s: %w", status.Status, errdefs.ErrFailedPrecondition)
	}
	if r.build.Base, err = r.base(ctx); err != nil {
		return err
	}
	r.build.BaseName = r.info.Image
	if r.previous != "" {
		previous, err := r.image(ctx, r.client, r.previous)
		if err != nil {
			return fmt.Errorf("--previous: %w", err)
		}
		if _, err := oci.Inspect(ctx, r.client.ContentStore(), previous.Target); err != nil {
			return fmt.Errorf("--previous %s: %w", r.previous, err)
		}
		r.build.Previous = &previous.Target
	}
	if r.dir, err = filepath.Abs(r.dir); err != nil { // containerd has another working directory
		return err
	}
	if err := os.MkdirAll(r.dir, 0o700); err != nil {
		return fmt.Errorf("make the directory for the dump: %w", err)
	}
	return nil
}

// base finds the container's image, and makes sure that its name still means
// what the container's files lie on.
func (r *checkpointRun) base(ctx context.Context) (none ocispec.Descriptor, _ error) {
	if r.info.Image == "" {
		return none, fmt.Errorf("it was not made from an image, so its checkpoint cannot be one: use `ctr tasks checkpoint --image-path DIR`: %w", errdefs.ErrFailedPrecondition)
	}
	found, err := r.image(ctx, r.client, r.info.Image)
	if err != nil {
		return none, fmt.Errorf("the image it was made from is needed: %w", err)
	}
	if r.info.SnapshotKey == "" {
		return found.Target, nil
	}
	diffIDs, err := client.NewImage(r.client, found).RootFS(ctx)
	if err != nil {
		return none, fmt.Errorf("read the image %s: %w", found.Name, err)
	}
	snapshot, err := r.client.SnapshotService(r.info.Snapshotter).Stat(ctx, r.info.SnapshotKey)
	if err != nil {
		return none, fmt.Errorf("look at its files: %w", err)
	}
	// A snapshot for a user namespace has a suffix.
	if chain := identity.ChainID(diffIDs).String(); snapshot.Parent != chain && !strings.HasPrefix(snapshot.Parent, chain+"-") {
		return none, fmt.Errorf("the image %s is another one by now than that it was made from; give that one its name back: %w", found.Name, errdefs.ErrFailedPrecondition)
	}
	return found.Target, nil
}
