// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"runtime"

	"github.com/containerd/containerd/v2/client"
	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/unpack"
	"golang.org/x/sync/semaphore"
)

// unpackLimit is how many layers are unpacked at once: containerd hashes and
// writes each on one processor.
func unpackLimit() *semaphore.Weighted { return semaphore.NewWeighted(int64(runtime.NumCPU())) }

// unpackImage makes an image that is in containerd's content store ready to be
// run, if it is not. Its layers are unpacked several at once where the
// snapshotter can put them together afterwards, as overlayfs can from containerd
// 2.2 on; image.Unpack of containerd's client takes them one by one.
func unpackImage(ctx context.Context, c *client.Client, image client.Image, snapshotter string) error {
	unpacked, err := image.IsUnpacked(ctx, snapshotter)
	if err != nil {
		return fmt.Errorf("look for the unpacked image: %w", err)
	}
	if unpacked {
		return nil
	}
	// The snapshots belong to nobody until the image's config names them.
	ctx, release, err := c.WithLease(ctx)
	if err != nil {
		return fmt.Errorf("unpack the image: %w", err)
	}
	defer func() { _ = release(context.WithoutCancel(ctx)) }() // it expires
	capabilities, err := c.GetSnapshotterCapabilities(ctx, snapshotter)
	if err != nil {
		return fmt.Errorf("unpack the image: %w", err)
	}
	unpacker, err := unpack.NewUnpacker(ctx, c.ContentStore(), unpack.WithUnpackLimiter(unpackLimit()), unpack.WithUnpackPlatform(unpack.Platform{
		Platform:                image.Platform(),
		SnapshotterKey:          snapshotter,
		Snapshotter:             c.SnapshotService(snapshotter),
		SnapshotterCapabilities: capabilities,
		Applier:                 c.DiffService(),
	}))
	if err != nil {
		return fmt.Errorf("unpack the image: %w", err)
	}
	handler := cimages.FilterPlatforms(cimages.ChildrenHandler(c.ContentStore()), image.Platform())
	err = cimages.Dispatch(ctx, unpacker.Unpack(handler), nil, image.Target())
	if _, werr := unpacker.Wait(); err == nil {
		err = werr
	}
	if err != nil {
		return fmt.Errorf("unpack the image: %w", err)
	}
	return nil
}
