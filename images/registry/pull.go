// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/client"
	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"

	"github.com/gpuckpt/gpuckpt/images/localstore"
)

// keepFor is how long containerd keeps what a pull that failed has fetched.
const keepFor = 24 * time.Hour

// Pull fetches an image into containerd and, with a snapshotter's name, unpacks it there while it
// comes in. The image gets its name when it is complete, unless another has it: then the error is
// localstore.ErrTaken. containerd keeps what a pull that fails has fetched for a day, for the next pull
// of that name.
func Pull(ctx context.Context, c *client.Client, ref, snapshotter string, options Options) (client.Image, *Result, error) {
	return PullAs(ctx, c, ref, snapshotter, options, nil)
}

// PullAs is Pull of an image of which another is made: that one gets the name. A nil make makes none.
func PullAs(ctx context.Context, c *client.Client, ref, snapshotter string, options Options, make func(context.Context, ocispec.Descriptor) (ocispec.Descriptor, error)) (_ client.Image, _ *Result, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("pull %s: %w", ref, err)
		}
	}()
	if err := localstore.CheckName(ref); err != nil {
		return nil, nil, err
	}
	o := options.defaults()
	ctx, end, err := Lease(ctx, c, ref)
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, end(err == nil)) }()
	p := &pull{transfer: newTransfer("pull", o), Resolver: newResolver(ctx, o), ref: ref, slots: semaphore.NewWeighted(int64(o.Parallel))}
	if make == nil {
		p.check = func(ctx context.Context, found digest.Digest) error { return localstore.CheckFree(ctx, c, ref, found) }
	}
	opts := []client.RemoteOpt{client.WithResolver(p), client.WithImageHandlerWrapper(p.observe)}
	if snapshotter != "" {
		opts = append(opts, client.WithPullUnpack, client.WithPullSnapshotter(snapshotter),
			client.WithUnpackOpts([]client.UnpackOpt{client.WithUnpackLimiter(semaphore.NewWeighted(int64(runtime.NumCPU())))}))
	}
	var fetched client.Image
	err = o.attempts(ctx, p.meter, func() (err error) {
		fetched, err = c.Pull(ctx, ref, opts...)
		return err
	})
	if err != nil {
		return nil, nil, explain(err, ref)
	}
	defer func() {
		derr := c.ImageService().Delete(context.WithoutCancel(ctx), fetched.Name())
		if !errdefs.IsNotFound(derr) { // another pull of the name has done so
			err = errors.Join(err, derr)
		}
	}()
	image := cimages.Image{Name: ref, Target: fetched.Target()}
	if make != nil {
		if image.Target, err = make(ctx, image.Target); err != nil {
			return nil, nil, err
		}
	}
	if err := localstore.Tag(ctx, c, ref, image.Target); err != nil {
		return nil, nil, err
	}
	if err := end(true); err != nil {
		return nil, nil, err
	}
	p.meter.End("pulled")
	return client.NewImage(c, image), p.result(), nil
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

// pull is a resolver whose fetchers count, and let only so many blobs move at once.
type pull struct {
	*transfer
	remotes.Resolver
	ref   string
	check func(context.Context, digest.Digest) error // of what the registry has; nil: none
	slots *semaphore.Weighted
}

// Resolve has containerd's client call the image by a name of ours, since it would take one from another
// image. No registry has that name, and no pod can: repositories are in small letters.
func (p *pull) Resolve(ctx context.Context, ref string) (string, ocispec.Descriptor, error) {
	_, found, err := p.Resolver.Resolve(ctx, ref)
	if err == nil && p.check != nil {
		err = p.check(ctx, found.Digest)
	}
	return localstore.Private + "Pull/" + digest.FromString(ref).Encoded() + ":1", found, err
}

// observe sees each descriptor of the image, once its parent was read.
func (p *pull) observe(next cimages.Handler) cimages.Handler {
	return cimages.HandlerFunc(func(ctx context.Context, d ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		p.know(d)
		children, err := next.Handle(ctx, d)
		if err == nil && cimages.IsManifestType(d.MediaType) {
			for _, child := range children {
				p.know(child)
			}
		}
		return children, err
	})
}

// Fetcher is the resolver's of the image's real name, wrapped.
func (p *pull) Fetcher(ctx context.Context, _ string) (remotes.Fetcher, error) {
	f, err := p.Resolver.Fetcher(ctx, p.ref)
	if err != nil {
		return nil, err
	}
	return remotes.FetcherFunc(func(ctx context.Context, d ocispec.Descriptor) (io.ReadCloser, error) {
		if err := p.slots.Acquire(ctx, 1); err != nil {
			return nil, err
		}
		data, err := f.Fetch(ctx, d)
		if err != nil {
			p.slots.Release(1)
			return nil, err
		}
		p.know(d)
		return &moving{ReadCloser: data, ctx: ctx, of: p.transfer, digest: d.Digest, done: sync.OnceFunc(func() { p.slots.Release(1) })}, nil
	}), nil
}
