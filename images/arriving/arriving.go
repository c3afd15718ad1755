// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package arriving fetches a checkpoint image from a registry, or unpacks one of containerd's, while it
// is restored.
//
// Begin fetches what is below the checkpoint, and CRIU's images. The restore can start then: its
// container has the files of Below, and the shim is given Dir, where it is told what arrives
// (package feed). GPU state streams in behind, several layers at once, each straight into the
// snapshot that it becomes: a byte is written once, and containerd's content store has no copy of
// it. A layer counts as arrived when its diff_id is right. Finish makes the snapshots the image's
// and gives the image its name.
//
// What has arrived is kept for a day, by the lease of a pull, and the next Begin continues there.
// One process fetches an image at a time; another one waits for it.
package arriving

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images/feed"
	"github.com/gpuckpt/gpuckpt/images/localstore"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/images/registry"
)

// ErrWhole reports that an image cannot be restored while it arrives: it has to be pulled before.
var ErrWhole = errors.New("it has to be pulled before it is restored")

// ErrHere reports that the image is in containerd meanwhile, fetched by another process.
var ErrHere = errors.New("it was fetched by somebody else meanwhile")

// Image is a checkpoint image that arrives.
type Image struct {
	// Below is the image that the container's files come from. It has the checkpoint's name.
	Below client.Image
	// Dir is what the shim is given for the checkpoint.
	Dir string

	c      *client.Client
	ctx    context.Context // of all that is fetched, with the lease
	cancel context.CancelFunc
	end    func(complete bool) error // of the lease
	letGo  func() error
	src    *registry.Source
	image  *oci.Image
	shots  snapshots.Snapshotter
	name   string // the snapshotter's
	chain  []digest.Digest
	own    []*layer // the checkpoint's, bottom up: GPU state and then CRIU's images
	feed   *feed.Feed
	group  *errgroup.Group
}

// Begin begins to fetch an image into containerd. It returns when the restore can start. The errors are
// ErrWhole, ErrHere, or those of a pull.
func Begin(ctx context.Context, c *client.Client, src *registry.Source, snapshotter string) (_ *Image, err error) {
	i := &Image{c: c, src: src, name: snapshotter, shots: c.SnapshotService(snapshotter), feed: feed.New()}
	capabilities, err := c.GetSnapshotterCapabilities(ctx, snapshotter)
	if err != nil {
		return nil, err
	}
	if !slices.Contains(capabilities, snapshots.RebaseCap) {
		return nil, fmt.Errorf("the snapshotter %s puts no layers together afterwards: %w", snapshotter, ErrWhole)
	}
	if i.image, err = oci.Outline(ctx, i.src, i.src.Image); err != nil {
		return nil, err
	}
	ctx, i.end, err = registry.Lease(ctx, c, src.Ref)
	if err != nil {
		return nil, err
	}
	// The way of all bytes ends with Close, and not with whoever has asked for the first of them.
	i.ctx, i.cancel = context.WithCancel(ctx)
	i.group, i.ctx = errgroup.WithContext(i.ctx)
	defer func() {
		if err != nil {
			err = errors.Join(err, i.Close())
		}
	}()
	if err := i.plan(); err != nil {
		return nil, err
	}
	if err := i.claim(); err != nil {
		return nil, err
	}
	if err := i.begin(); err != nil { //nolint:contextcheck // i.ctx is made of it
		return nil, cmp.Or(context.Cause(i.ctx), err) // a layer's, which has ended all else
	}
	return i, nil
}

// plan sorts the layers.
func (i *Image) plan() error {
	if i.image.Digest != i.src.Image.Digest {
		return fmt.Errorf("%s is an index of images: %w", i.src.Ref, ErrWhole)
	}
	if !i.image.Stackable() {
		return fmt.Errorf("%s has %d layers: %w", i.src.Ref, len(i.image.Layers), ErrWhole)
	}
	var ids []digest.Digest
	for n, l := range i.image.Layers {
		ids = append(ids, l.DiffID)
		switch {
		case l.Kind == oci.LayerGPU || l.Kind == oci.LayerCRIU:
			i.own = append(i.own, &layer{Target: Target{Layer: l, LayerBytes: i.image.LayerBytes}, i: i, number: n, made: make(chan struct{})})
		case len(i.own) > 0:
			return fmt.Errorf("the layers of %s are not in order: %w", i.src.Ref, ErrWhole)
		}
	}
	if i.criu().Kind != oci.LayerCRIU || i.own[0].number == 0 {
		return fmt.Errorf("the layers of %s are not in order: %w", i.src.Ref, ErrWhole)
	}
	if len(i.own) > 1 && !i.image.Anchored() { // what they become would be taken for what another image has
		return fmt.Errorf("the layers of GPU state of %s have no anchor, or that of others: %w", i.src.Ref, ErrWhole)
	}
	i.chain = identity.ChainIDs(ids)
	return nil
}

// criu returns the layer with CRIU's images.
func (i *Image) criu() *layer { return i.own[len(i.own)-1] }

// claim makes this process the one that fetches the image, by a lock on the directory that CRIU's
// images go to.
func (i *Image) claim() error {
	for {
		if err := i.criu().prepare(); err != nil {
			return err
		}
		root, err := os.Open(i.criu().Root)
		if err != nil {
			if errors.Is(err, os.ErrNotExist) {
				continue // it was committed or removed
			}
			return err
		}
		for {
			if err = unix.Flock(int(root.Fd()), unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
				break
			}
			select {
			case <-i.ctx.Done():
				return errors.Join(context.Cause(i.ctx), root.Close())
			case <-time.After(50 * time.Millisecond):
			}
		}
		if err != nil {
			return errors.Join(fmt.Errorf("lock %s: %w", root.Name(), err), root.Close())
		}
		i.letGo = root.Close
		mounts, err := i.shots.Mounts(i.ctx, i.criu().key())
		if err == nil && len(mounts) == 1 && mounts[0].Source == i.criu().Root {
			return nil
		}
		if err != nil && !errdefs.IsNotFound(err) {
			return err
		}
		// Whoever had it is done with it.
		i.letGo = nil
		root.Close()
		if found, err := localstore.Find(i.ctx, i.c, i.src.Ref); err == nil && found.Target.Digest == i.image.Digest {
			return ErrHere
		}
	}
}

// begin fetches what the restore begins with, and has the rest come behind.
func (i *Image) begin() error {
	first := []ocispec.Descriptor{i.src.Image, i.image.Config}
	for _, l := range i.image.Layers {
		if l.Kind != oci.LayerGPU {
			first = append(first, l.Descriptor())
		}
	}
	group, ctx := errgroup.WithContext(i.ctx)
	stored := i.store(ctx, group, first)
	i.group.SetLimit(i.src.Parallel + 1) // and who begins them
	roots := make([]string, len(i.own))
	roots[0] = i.criu().Root
	gpu := i.own[:len(i.own)-1]
	for n, l := range gpu {
		group.Go(func() error {
			err := l.prepare()
			roots[n+1] = l.Root
			if err == nil && !l.kept {
				err = l.Make()
			}
			if err == nil {
				close(l.made)
			}
			return err
		})
	}
	i.group.Go(func() error { return i.fetchAll(stored, gpu) })
	if err := group.Wait(); err != nil {
		return err
	}
	if err := i.keepAll(); err != nil {
		return err
	}
	below, err := oci.Below(i.ctx, i.c.ContentStore(), i.src.Image)
	if err != nil {
		return err
	}
	i.Below = client.NewImage(i.c, cimages.Image{Name: i.src.Ref, Target: below})
	if err := i.criu().Unpack(i.ctx, localstore.Content(i.ctx, i.c)); err != nil {
		return err
	}
	i.Dir = i.criu().Root
	return i.feed.Serve(i.Dir, roots)
}

// store fetches blobs into containerd's store, in a group. The channel that it returns is closed when
// all are there.
func (i *Image) store(ctx context.Context, group *errgroup.Group, blobs []ocispec.Descriptor) <-chan struct{} {
	done := make(chan struct{})
	var left sync.WaitGroup
	left.Add(len(blobs))
	var failed atomic.Bool
	for _, d := range blobs {
		group.Go(func() error {
			defer left.Done()
			err := i.src.Store(ctx, localstore.Outlasting(i.c), d)
			if err != nil {
				failed.Store(true)
			}
			return err
		})
	}
	go func() {
		if left.Wait(); !failed.Load() {
			close(done)
		}
	}()
	return done
}

// fetchAll begins to fetch layers, in their order, which is that of the digests' check: once what the
// restore begins with is here, and each once its own snapshot is there.
func (i *Image) fetchAll(first <-chan struct{}, gpu []*layer) error {
	for _, l := range gpu {
		for _, ready := range []<-chan struct{}{first, l.made} {
			select {
			case <-ready:
			case <-i.ctx.Done():
				return context.Cause(i.ctx)
			}
		}
		i.group.Go(l.fetch)
	}
	return nil
}

// keepAll has containerd keep the blobs of the manifest that are in its store.
func (i *Image) keepAll() error {
	labels := map[string]string{"containerd.io/gc.ref.content.config": i.image.Config.Digest.String()}
	for n, l := range i.image.Layers {
		if l.Kind != oci.LayerGPU {
			labels[fmt.Sprintf("containerd.io/gc.ref.content.l.%d", n)] = l.Digest.String()
		}
	}
	return i.label(i.image.Digest, labels)
}

// label adds labels to a blob.
func (i *Image) label(d digest.Digest, labels map[string]string) error {
	var fields []string
	for key := range labels {
		fields = append(fields, "labels."+key)
	}
	if _, err := i.c.ContentStore().Update(i.ctx, content.Info{Digest: d, Labels: labels}, fields...); err != nil {
		return fmt.Errorf("have containerd keep %s: %w", d, err)
	}
	return nil
}

// Finish waits until all of the image has arrived, and makes it an image of containerd, unpacked. One that
// came from a content store has its name already, or has lost it meanwhile.
func (i *Image) Finish() error {
	if err := i.finish(); err != nil {
		return fmt.Errorf("fetch %s: %w", i.src.Ref, err)
	}
	i.src.End("complete")
	return nil
}

func (i *Image) finish() error {
	if err := i.group.Wait(); err != nil {
		return err
	}
	ctx := context.WithoutCancel(i.ctx) // which ends with the group
	if err := localstore.Unpack(ctx, i.c, i.Below, i.name); err != nil {
		return err
	}
	if err := i.feed.Close(); err != nil {
		return err
	}
	for _, l := range i.own {
		if err := l.commit(ctx); err != nil {
			return err
		}
	}
	i.ctx = ctx
	top := i.chain[len(i.chain)-1].String()
	if err := i.label(i.image.Config.Digest, map[string]string{"containerd.io/gc.ref.snapshot." + i.name: top}); err != nil {
		return err
	}
	if !i.src.Local {
		if err := localstore.Tag(ctx, i.c, i.src.Ref, i.src.Image); err != nil {
			return err
		}
	}
	return i.end(true)
}

// Close ends what is under way. What has arrived from a registry stays for the next Begin.
func (i *Image) Close() error {
	i.cancel()
	_ = i.group.Wait() // Finish has its error, and so has the restore
	err := errors.Join(i.feed.Close(), i.end(i.src.Local))
	if i.letGo != nil {
		err = errors.Join(err, i.letGo())
	}
	return err
}

// layer is a layer of the checkpoint, on its way into a snapshot of its own.
type layer struct {
	Target
	i      *Image
	number int
	kept   bool          // it had arrived before
	made   chan struct{} // closed when there is a file for it
}

// key is the name of the snapshot while the layer arrives.
func (l *layer) key() string {
	return fmt.Sprintf("gpuckpt-arriving-%s-%d", l.i.image.Digest.Encoded(), l.number)
}

// arrivedLabel is on the snapshot of a layer that has arrived, with its diff_id.
const arrivedLabel = "dev.gpuckpt.arrived"

// prepare makes the layer's snapshot, or finds the one of an earlier try.
func (l *layer) prepare() error {
	ctx, shots := l.i.ctx, l.i.shots
	mounts, err := shots.Prepare(ctx, l.key(), "")
	if errdefs.IsAlreadyExists(err) {
		var info snapshots.Info
		if info, err = shots.Stat(ctx, l.key()); err == nil {
			l.kept = info.Labels[arrivedLabel] == l.DiffID.String()
			mounts, err = shots.Mounts(ctx, l.key())
		}
	}
	if err != nil {
		return fmt.Errorf("make a snapshot for layer %s: %w", l.Digest, err)
	}
	if len(mounts) != 1 || mounts[0].Type != "bind" {
		return fmt.Errorf("the snapshotter %s has no directories: %w", l.i.name, ErrWhole)
	}
	l.Root = mounts[0].Source
	return nil
}

// fetch fetches a layer of GPU state into its file, and tells of it. The first error is what is told.
func (l *layer) fetch() error {
	if err := l.arrive(); err != nil {
		l.i.feed.Fail(err)
		return err
	}
	l.i.feed.Arrived(l.File())
	return nil
}

func (l *layer) arrive() error {
	if l.kept {
		return nil
	}
	l.Part = func(bytes uint64) { l.i.feed.Part(l.File(), bytes) }
	if err := l.Fetch(l.i.ctx, l.i.src); err != nil {
		return err
	}
	info := snapshots.Info{Name: l.key(), Labels: map[string]string{arrivedLabel: l.DiffID.String()}}
	if _, err := l.i.shots.Update(l.i.ctx, info, "labels."+arrivedLabel); err != nil {
		return fmt.Errorf("keep layer %s: %w", l.Digest, err)
	}
	return nil
}

// commit makes the layer's snapshot that of the image.
func (l *layer) commit(ctx context.Context) error {
	chain, parent := l.i.chain[l.number].String(), l.i.chain[l.number-1].String()
	err := l.i.shots.Commit(ctx, chain, l.key(), snapshots.WithParent(parent), snapshots.WithLabels(map[string]string{snapshots.LabelSnapshotRef: chain}))
	if errdefs.IsAlreadyExists(err) {
		err = l.i.shots.Remove(ctx, l.key())
	}
	if err != nil {
		return fmt.Errorf("keep layer %s: %w", l.Digest, err)
	}
	return nil
}
