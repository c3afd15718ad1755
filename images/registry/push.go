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
	"sync"

	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/pkg/reference"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

// ErrNotPushable says that an image is in a form that registries refuse.
var ErrNotPushable = errors.New("registries do not take this form of image")

// distributionSource begins the labels by which containerd remembers the
// repositories that a blob came from: one of them may have it mounted.
const distributionSource = "containerd.io/distribution.source."

// Push sends an image to the registry that ref names, "example.com/job:1". The
// manifest goes last: on an error the registry has the old image of that name, or
// none, and blobs that the next push will find.
//
// The errors are ErrNotAuthorized, ErrNotPushable, errdefs.ErrNotFound where the
// store lacks a blob, or those of the registry and the network.
func Push(ctx context.Context, store content.Provider, ref string, image ocispec.Descriptor, options Options) (_ *Result, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("push %s: %w", ref, err)
		}
	}()
	o := options.defaults()
	spec, err := parse(ref)
	if err != nil {
		return nil, err
	}
	blobs, manifests, err := contents(ctx, store, image)
	if err != nil {
		return nil, err
	}
	pusher, err := newResolver(ctx, o).Pusher(ctx, ref)
	if err != nil {
		return nil, err
	}
	p := &push{Options: o, store: store, pusher: pusher}
	for _, d := range slices.Concat(blobs, manifests) {
		p.result.Blobs++
		p.result.Bytes += d.Size
	}
	p.meter = o.Progress.Begin("push", uint64(p.result.Bytes))

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
		return nil, explain(err, spec.Hostname())
	}
	p.meter.End("pushed")
	return &p.result, nil
}

// parse reads the name of an image in a registry.
func parse(ref string) (reference.Spec, error) {
	spec, err := reference.Parse(ref)
	if err != nil {
		err = fmt.Errorf("it is not an image reference such as example.com/job:1: %w", err)
	}
	return spec, err
}

// contents lists an image's blobs, each once, and the manifests in the order in
// which a registry takes them: an index after what it names.
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

// push is one push.
type push struct {
	Options
	store  content.Provider
	pusher remotes.Pusher
	meter  *images.Meter

	mu     sync.Mutex
	result Result
}

// send sends one blob unless it is there.
func (p *push) send(ctx context.Context, d ocispec.Descriptor) error {
	gpu := d.Annotations[annotations.Layer] == oci.LayerGPU
	var reused bool
	err := p.attempts(ctx, p.meter, func() (err error) {
		reused, err = p.try(ctx, d)
		return err
	})
	if err != nil {
		return fmt.Errorf("%s: %w", d.Digest, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if gpu {
		p.result.GPUBytes += d.Size
	}
	if reused {
		p.result.Reused += d.Size
		if gpu {
			p.result.GPUReused += d.Size
		}
	} else {
		p.result.Moved += d.Size
	}
	return nil
}

// try sends one blob once. On an error it takes back what it has counted.
func (p *push) try(ctx context.Context, d ocispec.Descriptor) (reused bool, err error) {
	w, err := p.pusher.Push(ctx, p.withSources(ctx, d))
	if errdefs.IsAlreadyExists(err) {
		p.meter.Add(d.Size)
		return true, nil
	}
	if err != nil {
		return false, err
	}
	defer w.Close()
	data, err := p.store.ReaderAt(ctx, d)
	if err != nil {
		return false, localError{fmt.Errorf("read it from the store: %w", err)}
	}
	defer data.Close()
	if data.Size() != d.Size {
		return false, localError{fmt.Errorf("the store has %d bytes of %d", data.Size(), d.Size)}
	}
	counted := &counter{ReadSeeker: io.NewSectionReader(data, 0, d.Size), ctx: ctx, meter: p.meter}
	if err := content.Copy(ctx, w, counted, d.Size, d.Digest); err != nil && !errdefs.IsAlreadyExists(err) {
		p.meter.Add(-counted.at)
		if counted.err != nil {
			return false, localError{counted.err}
		}
		return false, err
	}
	return false, nil
}

// withSources adds to a blob's descriptor where containerd had it from, so that
// a registry can take it from its other repository.
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

// counter reports what is read, by the furthest position: a retry inside
// containerd's writer seeks back. It fails when ctx ends, for the writer to
// the registry does not look.
type counter struct {
	io.ReadSeeker
	ctx   context.Context
	meter *images.Meter
	at    int64
	err   error // of reading
}

func (c *counter) Read(p []byte) (int, error) {
	if err := context.Cause(c.ctx); err != nil {
		return 0, err
	}
	n, err := c.ReadSeeker.Read(p)
	c.at += int64(n)
	c.meter.Add(int64(n))
	if err != nil && !errors.Is(err, io.EOF) {
		c.err = err
	}
	return n, err
}

func (c *counter) Seek(offset int64, whence int) (int64, error) {
	at, err := c.ReadSeeker.Seek(offset, whence)
	if err == nil {
		c.meter.Add(at - c.at)
		c.at = at
	}
	return at, err
}
