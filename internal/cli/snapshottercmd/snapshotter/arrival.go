// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images/arriving"
	"github.com/gpuckpt/gpuckpt/images/feed"
	"github.com/gpuckpt/gpuckpt/images/localstore"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/images/registry"
)

// arrival is a checkpoint image whose GPU state is fetched, from the first Prepare of a layer to the
// last byte.
type arrival struct {
	s *Snapshotter

	// preparing is held by who makes snapshots of it.
	preparing sync.Mutex
	image     *oci.Image // nil when no client pulls; set with mu held, too
	chain     []digest.Digest
	lease     context.Context // of what is written to the content store
	criu      chan error      // tells once that CRIU's images are in the content store; nil: begin again

	from source

	mu sync.Mutex
	record
	holds  *holds
	feed   *feed.Feed // serves once CRIU's images are here
	failed error      // why something is missing that nobody fetches
	over   bool
	left   chan struct{} // closed when an arrival that is over has left
}

func newArrival(s *Snapshotter, r record) *arrival {
	return &arrival{s: s, record: r, feed: feed.New(), left: make(chan struct{})}
}

// part is a layer of GPU state in a snapshot.
type part struct {
	arriving.Target
	Name    string `json:"name"` // of the snapshot
	Arrived bool   `json:"arrived,omitempty"`

	cancel context.CancelFunc // nil: nobody fetches it
	done   chan struct{}
}

// begin looks at an image of which a layer is to be prepared. It returns false if containerd is to
// unpack it. The error is why the GPU state of a checkpoint cannot be fetched here.
func (a *arrival) begin(ctx context.Context, ref, manifest string) (ours bool, err error) {
	c, err := a.s.o.Dial()
	if err != nil {
		return false, err
	}
	defer func() {
		if !ours {
			c.Close()
		}
	}()
	ctx = namespaces.WithNamespace(ctx, a.Namespace)
	desc := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest, Digest: digest.Digest(manifest)}
	info, err := c.ContentStore().Info(ctx, desc.Digest)
	if err != nil {
		return false, nil //nolint:nilerr // a layer without its manifest is containerd's
	}
	desc.Size = info.Size
	image, err := oci.Outline(ctx, c.ContentStore(), desc)
	if err != nil || !inOrder(image) {
		return false, nil //nolint:nilerr // it is no checkpoint, or not one to be restored while it arrives
	}
	name, _, _ := strings.Cut(ref, "@")
	a.mu.Lock()
	a.Ref = name + "@" + manifest
	a.mu.Unlock()
	if _, err := a.from.open(a); err != nil {
		return false, err
	}
	var ids []digest.Digest
	for _, l := range image.Layers {
		ids = append(ids, l.DiffID)
	}
	lease, end, err := registry.Lease(namespaces.WithNamespace(a.s.ctx, a.Namespace), c, a.Ref)
	if err != nil {
		return false, err
	}
	h := newHolds(lease, c, func() error { return end(true) })
	a.mu.Lock()
	a.image, a.holds = image, h
	a.mu.Unlock()
	a.chain, a.lease, a.criu = identity.ChainIDs(ids), lease, nil
	a.storeCRIU()
	return true, nil
}

// storeCRIU begins to fetch CRIU's images into the content store.
func (a *arrival) storeCRIU() {
	told, lease, store, last := make(chan error, 1), a.lease, a.holds.c.ContentStore(), a.image.Layers[len(a.image.Layers)-1]
	a.criu = told
	a.s.under.Go(func() {
		src, err := a.from.open(a)
		if err == nil {
			err = src.Store(lease, store, last.Descriptor())
		}
		told <- err
	})
}

// inOrder reports whether an image has layers of GPU state above their anchor, and all in the clear. GPU state is
// committed before its bytes are here: the anchor keeps it from being taken for a layer of another image.
func inOrder(i *oci.Image) bool {
	return i.Anchored() && i.Stackable() && !slices.ContainsFunc(i.Layers, func(l oci.Layer) bool {
		return !cimages.IsLayerType(l.MediaType) || strings.Contains(l.MediaType, "encrypted")
	})
}

// prepare commits a layer's snapshot if it is one of the checkpoint's. made says that it did, or had
// before. preparing is held.
func (a *arrival) prepare(ctx context.Context, key, parent, target string, labels map[string]string) (made bool, err error) {
	n := slices.Index(a.chain, digest.Digest(target))
	if n < 0 || a.image.Layers[n].Kind != oci.LayerGPU && a.image.Layers[n].Kind != oci.LayerCRIU {
		return false, nil
	}
	l := a.image.Layers[n]
	name, err := a.s.committed(ctx, target, parent)
	if err != nil {
		return false, err
	}
	if name == "" {
		if err = a.make(ctx, n, key, parent, labels); err != nil {
			return false, fmt.Errorf("layer %s: %w", l.Digest, err)
		}
	} else {
		a.s.wake(name)
	}
	if l.Kind == oci.LayerCRIU {
		h, config := a.holds, a.image.Config.Digest
		a.s.under.Go(func() { h.endAfterPull(config) })
		a.mu.Lock()
		a.image = nil
		a.mu.Unlock()
		a.end()
	}
	return true, nil
}

// make makes the snapshot of a layer of the checkpoint. On an error there is none.
func (a *arrival) make(ctx context.Context, n int, key, parent string, labels map[string]string) (err error) {
	mounts, err := a.s.Snapshotter.Prepare(ctx, key, parent, snapshots.WithLabels(labels))
	if err != nil {
		return err
	}
	name := key + arrivingSuffix
	defer func() {
		if err != nil {
			a.s.mu.Lock()
			delete(a.s.parts, name)
			a.s.mu.Unlock()
			err = errors.Join(err, a.s.Snapshotter.Remove(context.WithoutCancel(ctx), key), a.drop(name))
		}
	}()
	root, below, err := roots(mounts)
	if err != nil {
		return err
	}
	p := &part{Target: arriving.Target{Layer: a.image.Layers[n], LayerBytes: a.image.LayerBytes, Root: root}, Name: name}
	a.s.mu.Lock()
	a.s.parts[name] = a
	a.s.mu.Unlock()
	if p.Kind == oci.LayerGPU {
		if err := p.Make(); err != nil {
			return err
		}
		a.mu.Lock()
		a.Parts = append(a.Parts, p)
		err = a.save()
		a.mu.Unlock()
	} else {
		err = a.addCRIU(ctx, p, below)
	}
	if err != nil {
		return err
	}
	if err := a.s.Snapshotter.Commit(ctx, name, key, snapshots.WithLabels(labels)); err != nil {
		return err
	}
	if p.Kind == oci.LayerGPU {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.start(p)
	}
	return nil
}

// addCRIU unpacks the layer with CRIU's images, and begins to tell what has arrived. below are the
// directories of the layers below, the topmost first.
func (a *arrival) addCRIU(ctx context.Context, p *part, below []string) error {
	if a.criu == nil {
		a.storeCRIU()
	}
	select {
	case err := <-a.criu:
		a.criu = nil
		if err != nil {
			return err
		}
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if err := p.Unpack(a.lease, localstore.Content(a.lease, a.holds.c)); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.CRIU, a.Dir = p.Name, filepath.Dir(p.Root)
	// All files of GPU state, also those of layers that were here before this arrival.
	a.Roots, a.Files = []string{p.Root}, nil
	last := len(a.image.Layers) - 1
	for n, l := range a.image.Layers[:last] {
		if l.Kind != oci.LayerGPU {
			continue
		}
		if last-1-n >= len(below) {
			return fmt.Errorf("there are %d directories below %d layers", len(below), last)
		}
		t := arriving.Target{Layer: l, Root: below[last-1-n]}
		a.Roots, a.Files = append(a.Roots, t.Root), append(a.Files, t.File())
	}
	if err := a.save(); err != nil {
		return err
	}
	return a.tell()
}

// tell has the feed serve, and tell of what nobody fetches, since it was here before. a.mu is held.
func (a *arrival) tell() error {
	for _, file := range a.Files {
		if !slices.ContainsFunc(a.Parts, func(p *part) bool { return !p.Arrived && p.File() == file }) {
			a.feed.Arrived(file)
		}
	}
	return a.feed.Serve(a.Dir, a.Roots)
}

// start has a layer fetched. a.mu is held.
func (a *arrival) start(p *part) {
	ctx, cancel := context.WithCancel(namespaces.WithNamespace(a.s.ctx, a.Namespace))
	p.cancel, p.done = cancel, make(chan struct{})
	p.Part = func(bytes uint64) { a.feed.Part(p.File(), bytes) }
	a.s.under.Go(func() {
		defer close(p.done)
		err := a.fetch(ctx, p)
		cancel()
		a.arrived(p, err)
	})
}

// fetch fetches a layer of GPU state: from the content store if it is there, else from the registry.
func (a *arrival) fetch(ctx context.Context, p *part) error {
	err := error(errdefs.ErrNotFound)
	if c, derr := a.s.o.Dial(); derr == nil {
		if _, err = c.ContentStore().Info(ctx, p.Digest); err == nil {
			err = p.Fetch(ctx, registry.Local(localstore.Content(ctx, c), a.Ref, ocispec.Descriptor{}, "", registry.Options{}))
		}
		c.Close()
	}
	if err != nil { // also what is wrong there
		var src *registry.Source
		if src, err = a.from.open(a); err == nil {
			err = p.Fetch(ctx, src)
		}
	}
	if err == nil {
		err = syncFile(p.File())
	}
	return err
}

// arrived notes what became of a fetch.
func (a *arrival) arrived(p *part, err error) {
	if err != nil {
		a.from.again()
	}
	a.mu.Lock()
	p.cancel = nil
	entry := log.G(a.s.ctx).WithField("image", a.Ref).WithField("layer", p.Digest)
	switch {
	case !slices.Contains(a.Parts, p) || a.s.ctx.Err() != nil:
	case err == nil:
		p.Arrived = true
		if serr := a.save(); serr != nil {
			entry.WithError(serr).Error("cannot record that GPU state has arrived: after a restart it is fetched again")
		}
		a.feed.Arrived(p.File())
	default:
		entry.WithError(err).Error("cannot fetch GPU state: the next container of the image has it tried again")
		if a.failed == nil {
			a.failed = err
			a.feed.Fail(err)
		}
	}
	a.mu.Unlock()
	a.end()
}

// retry fetches again what is missing and nobody fetches.
func (a *arrival) retry() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.failed == nil {
		return
	}
	a.failed = nil
	a.feed.Retry()
	for _, p := range a.Parts {
		if !p.Arrived && p.cancel == nil {
			a.start(p)
		}
	}
}

// end ends an arrival of which everything is here, or nothing, if no client pulls it.
func (a *arrival) end() {
	a.mu.Lock()
	missing := slices.ContainsFunc(a.Parts, func(p *part) bool { return !p.Arrived })
	over := !a.over && a.image == nil && !missing && (a.CRIU != "" || len(a.Parts) == 0)
	a.over = a.over || over
	a.mu.Unlock()
	if over {
		a.leave()
	}
}

// isOver reports whether the arrival has left, or is about to.
func (a *arrival) isOver() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.over
}

// leave takes an arrival away: first the feed, whose socket says that something is missing.
func (a *arrival) leave() {
	defer close(a.left)
	err := a.feed.Close()
	if err == nil {
		err = a.forget()
	}
	if err != nil {
		log.G(a.s.ctx).WithError(err).WithField("image", a.Ref).Error("cannot end the arrival of an image; a restart tries it again")
	}
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	for name, of := range a.s.parts {
		if of == a {
			delete(a.s.parts, name)
		}
	}
	if at := arrivalKey(a.Namespace, a.Manifest); a.s.arrivals[at] == a {
		delete(a.s.arrivals, at)
	}
}

// drop ends what is done for a snapshot that was removed.
func (a *arrival) drop(name string) error {
	a.mu.Lock()
	var fetched <-chan struct{}
	a.Parts = slices.DeleteFunc(a.Parts, func(p *part) bool {
		if p.Name == name && p.cancel != nil {
			p.cancel()
			fetched = p.done
		}
		return p.Name == name
	})
	var untold error
	if a.CRIU == name {
		untold, a.CRIU, a.Dir = a.feed.Close(), "", ""
	}
	err := errors.Join(a.save(), untold)
	a.mu.Unlock()
	if fetched != nil {
		<-fetched
	}
	a.end()
	return err
}

// letGo lets others write the blobs of the image, at once.
func (a *arrival) letGo() {
	a.mu.Lock()
	h := a.holds
	a.mu.Unlock()
	if h != nil {
		h.end()
	}
}
