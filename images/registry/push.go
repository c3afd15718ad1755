// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"
)

// ErrNotPushable says that an image is in a form that registries refuse.
var ErrNotPushable = errors.New("registries do not take this form of image")

// distributionSource begins the labels of the repositories that a blob came from, to be mounted.
const distributionSource = "containerd.io/distribution.source."

// Push sends an image to the registry that ref names, "example.com/job:1". The manifest goes last:
// after an error the registry has the old image of that name, or none, and the blobs sent.
//
// The errors are ErrNotAuthorized, ErrNotPushable, errdefs.ErrNotFound where the store lacks a
// blob, or those of the registry and the network.
func Push(ctx context.Context, store content.Provider, ref string, image ocispec.Descriptor, options Options) (*Result, error) {
	o := options.defaults()
	blobs, manifests, err := contents(ctx, store, image)
	if err != nil {
		return nil, err
	}
	p := o.Ahead.pushFor(ctx, ref)
	if p == nil {
		if p, err = newPush(ctx, store, ref, o); err != nil {
			return nil, err
		}
	}
	p.store = store
	for _, d := range slices.Concat(blobs, manifests) {
		p.know(d)
	}
	group, gctx := errgroup.WithContext(ctx)
	group.SetLimit(o.Parallel)
	for _, d := range blobs {
		group.Go(func() error { return p.send(gctx, d) })
	}
	err = group.Wait()
	for _, d := range manifests {
		if err == nil {
			err = p.send(ctx, d)
		}
	}
	if err != nil {
		return nil, explain(err, ref)
	}
	p.meter.End("pushed")
	return p.result(), nil
}

// contents lists an image's blobs, each once, and the manifests, an index after what it names.
func contents(ctx context.Context, store content.Provider, image ocispec.Descriptor) (blobs, manifests []ocispec.Descriptor, err error) {
	seen := make(map[digest.Digest]bool)
	platform := cimages.FilterPlatforms(cimages.ChildrenHandler(store), platforms.All)
	var walk func(d ocispec.Descriptor) error
	walk = func(d ocispec.Descriptor) error {
		if seen[d.Digest] {
			return nil
		}
		seen[d.Digest] = true
		switch {
		case cimages.IsManifestType(d.MediaType), cimages.IsIndexType(d.MediaType):
			children, err := platform.Handle(ctx, d)
			if err != nil {
				return fmt.Errorf("read the manifest %s: %w", d.Digest, err)
			}
			for _, child := range children {
				if cimages.IsIndexType(d.MediaType) && !cimages.IsManifestType(child.MediaType) && !cimages.IsIndexType(child.MediaType) {
					return fmt.Errorf("%w: it is an index of %s, a checkpoint as `ctr` makes it; convert it first: gpuckpt image convert", ErrNotPushable, child.MediaType)
				}
				if err := walk(child); err != nil {
					return err
				}
			}
			manifests = append(manifests, d)
		case cimages.IsNonDistributable(d.MediaType):
			// where it is to be had is in the manifest
		default:
			blobs = append(blobs, d)
		}
		return nil
	}
	err = walk(image)
	return blobs, manifests, err
}

type push struct {
	*transfer
	store  content.Provider
	pusher remotes.Pusher
}

func newPush(ctx context.Context, store content.Provider, ref string, o Options) (*push, error) {
	pusher, err := newResolver(ctx, o).Pusher(ctx, ref)
	if err != nil {
		return nil, err
	}
	return &push{transfer: newTransfer("push", o), store: store, pusher: pusher}, nil
}

func (p *push) send(ctx context.Context, d ocispec.Descriptor) error {
	if err := p.attempts(ctx, p.meter, func() error { return p.try(ctx, d) }); err != nil {
		return fmt.Errorf("%s: %w", d.Digest, err)
	}
	return nil
}

func (p *push) try(ctx context.Context, d ocispec.Descriptor) error {
	w, err := p.pusher.Push(ctx, p.withSources(ctx, d))
	if errdefs.IsAlreadyExists(err) {
		p.reach(d.Digest, d.Size, 0)
		return nil
	}
	if err != nil {
		return err
	}
	defer w.Close()
	data, err := p.store.ReaderAt(ctx, d)
	if errdefs.IsNotFound(err) {
		return finalError{fmt.Errorf("it is not in the store; `gpuckpt image pull --no-unpack` fetches what an image lacks: %w", err)}
	}
	if err != nil {
		return finalError{fmt.Errorf("read it from the store: %w", err)}
	}
	defer data.Close()
	if data.Size() != d.Size {
		return finalError{fmt.Errorf("the store has %d bytes of %d", data.Size(), d.Size)}
	}
	m := &moving{SectionReader: io.NewSectionReader(data, 0, d.Size), ctx: ctx, of: p.transfer, digest: d.Digest}
	if err := content.Copy(ctx, w, m, d.Size, d.Digest); err != nil && !errdefs.IsAlreadyExists(err) {
		if m.err != nil {
			return finalError{m.err}
		}
		return err
	}
	return nil
}

// withSources adds where containerd had a blob from: the registry can take it from there.
func (p *push) withSources(ctx context.Context, d ocispec.Descriptor) ocispec.Descriptor {
	d.Annotations = nil // those of the manifest are nothing to the registry
	infos, ok := p.store.(content.InfoProvider)
	if !ok || cimages.IsManifestType(d.MediaType) || cimages.IsIndexType(d.MediaType) {
		return d
	}
	info, err := infos.Info(ctx, d.Digest)
	if err != nil {
		return d // reading it will say why
	}
	d.Annotations = maps.Clone(info.Labels)
	maps.DeleteFunc(d.Annotations, func(name, _ string) bool { return !strings.HasPrefix(name, distributionSource) })
	return d
}
