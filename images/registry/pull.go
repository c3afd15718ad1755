// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/localstore"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

// keepFor is how long containerd keeps what a pull that failed has fetched.
const keepFor = 24 * time.Hour

// Pull fetches the image into containerd and, with a snapshotter's name, unpacks it there.
// With a make, another image is made of it, which is unpacked in its place. It gets the name
// when it is complete, unless another image has it: then the error is localstore.ErrTaken. containerd
// keeps what a pull that fails has fetched for a day, for the next pull of that name.
func (s *Source) Pull(ctx context.Context, c *client.Client, snapshotter string, make func(context.Context, ocispec.Descriptor) (ocispec.Descriptor, error)) (_ client.Image, _ *Result, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("pull %s: %w", s.Ref, err)
		}
	}()
	if make == nil {
		if err := localstore.CheckFree(ctx, c, s.Ref, s.Image.Digest); err != nil {
			return nil, nil, err
		}
	}
	ctx, end, err := Lease(ctx, c, s.Ref)
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, end(err == nil)) }()
	image := cimages.Image{Name: s.Ref, Target: s.Image}
	local := sync.OnceValue(func() *localstore.Store {
		store, _ := localstore.Of(ctx, c) // what it needs, the manifest, is there
		return store
	})
	fetch, err := s.handler(localstore.Outlasting(c), local, client.NewImage(c, image).Platform())
	if err != nil {
		return nil, nil, err
	}
	if err := cimages.Dispatch(ctx, fetch, nil, image.Target); err != nil {
		return nil, nil, err
	}
	if make != nil {
		if image.Target, err = make(ctx, image.Target); err != nil {
			return nil, nil, err
		}
	}
	pulled := client.NewImage(c, image)
	if snapshotter != "" {
		if err := localstore.Unpack(ctx, c, pulled, snapshotter, local()); err != nil {
			return nil, nil, err
		}
	}
	if err := localstore.Tag(ctx, c, s.Ref, image.Target); err != nil {
		return nil, nil, err
	}
	if err := end(true); err != nil {
		return nil, nil, err
	}
	return pulled, s.End("pulled"), nil
}

// Lease keeps containerd from collecting what comes in. Each pull has a lease of its own, so that one
// that ends takes nothing from another of the same name. end ends it: complete says that the image
// is there. What has come in otherwise is kept for a day, for the next pull of the name, by a lease
// that all failed pulls of the name share. So it is if the program is killed, by the pull's own.
// Only the first call of end counts.
func Lease(ctx context.Context, c *client.Client, ref string) (_ context.Context, end func(complete bool) error, _ error) {
	service := c.LeasesService()
	own, err := service.Create(ctx, leases.WithRandomID(), leases.WithExpiration(keepFor))
	if err != nil {
		return nil, nil, fmt.Errorf("keep containerd from collecting what is fetched: %w", err)
	}
	failed := leases.Lease{ID: "gpuckpt-pull-" + digest.FromString(ref).Encoded()}
	ended := false
	return leases.WithLease(ctx, own.ID), func(complete bool) error {
		if ended {
			return nil
		}
		ended = true
		ctx := context.WithoutCancel(ctx)
		ends := []leases.Lease{own}
		if complete {
			ends = append(ends, failed)
		} else if err := hand(ctx, service, own, failed); err != nil {
			return fmt.Errorf("keep what was fetched: %w", err)
		}
		for _, l := range ends {
			if err := service.Delete(ctx, l); err != nil && !errdefs.IsNotFound(err) {
				return fmt.Errorf("let go of what was fetched: %w", err)
			}
		}
		return nil
	}, nil
}

// hand gives what one lease keeps to another as well, which is made if need be.
func hand(ctx context.Context, service leases.Manager, from, to leases.Lease) error {
	all, err := service.ListResources(ctx, from)
	if err != nil || len(all) == 0 {
		return err
	}
	if _, err := service.Create(ctx, leases.WithID(to.ID), leases.WithExpiration(keepFor)); err != nil && !errdefs.IsAlreadyExists(err) {
		return err
	}
	for _, r := range all {
		if err := service.AddResource(ctx, to, r); err != nil {
			return err
		}
	}
	return nil
}

// handler fetches a blob into a content store, and returns those that it names, for a platform. It labels
// them as containerd's own pull does: for the garbage collector, and with where they came from.
func (s *Source) handler(store content.Store, local func() *localstore.Store, platform platforms.MatchComparer) (cimages.Handler, error) {
	from, err := docker.AppendDistributionSourceLabel(store, s.Ref)
	if err != nil {
		return nil, err
	}
	children := cimages.SetChildrenMappedLabels(store, cimages.ChildrenHandler(store), nil)
	children = cimages.LimitManifests(cimages.FilterPlatforms(children, platform), platform, 1)
	return cimages.HandlerFunc(func(ctx context.Context, d ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		if err := s.Fetch(ctx, store, local, d); err != nil {
			return nil, err
		}
		found, err := children.Handle(ctx, d)
		if err != nil {
			return nil, err
		}
		if cimages.IsManifestType(d.MediaType) {
			for _, child := range found {
				s.know(child)
			}
		}
		_, err = from.Handle(ctx, d)
		return found, err
	}), nil
}

// Fetch fetches a blob into a content store: a large one of a checkpoint past containerd's socket, by local, which is the
// same store; nil: there is none on this machine.
func (s *Source) Fetch(ctx context.Context, store content.Store, local func() *localstore.Store, d ocispec.Descriptor) error {
	if d.MediaType == oci.MediaTypeGPU || d.Annotations[annotations.Layer] == oci.LayerCRIU {
		if there := local(); there != nil {
			store = there
		}
	}
	return s.Store(ctx, store, d)
}
