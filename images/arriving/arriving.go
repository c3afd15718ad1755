// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package arriving restores a checkpoint image while its memory and GPU state still come from a registry.
//
// Begin fetches and unpacks all layers. The image can be run then: the blobs of these come behind, by several
// connections, and a feed beside the topmost layer tells the shim of them. No byte is written twice, so what the shim has
// compared with the checkpoint's own digests stays right. Each becomes a blob of containerd's content store when its
// SHA-256 is right too. One processor computes that meanwhile, and all do once the container runs: it is half of the time
// of a fetch (H200, 16 CPUs). Finish waits for the last, and gives the image its name. What has come stays for a day if
// that fails, for the next pull of the name.
package arriving

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
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

// ErrWhole reports an image that cannot be restored while it arrives: pull it first.
var ErrWhole = errors.New("it has to be pulled before it is restored")

// ErrHere reports an image that containerd has got meanwhile, by another who fetched it.
var ErrHere = errors.New("it was fetched by somebody else meanwhile")

// directory is beside containerd's blobs. In it each image that arrives has one, with links to its blobs, complete or
// not, by the hexadecimal digits of their digests.
const directory = "gpuckpt-arriving"

// Image is an image whose blobs arrive. It is unpacked, and has no name yet.
type Image struct {
	client.Image

	c      *client.Client
	ctx    context.Context // of all that is fetched, with the lease
	cancel context.CancelFunc
	end    func(complete bool) error // of the lease
	src    *registry.Source
	image  *oci.Image
	store  *localstore.Store
	dir    string   // of its blobs
	lock   *os.File // of dir
	feed   *feed.Feed
	early  []*blob         // what containerd lacked
	group  *errgroup.Group // of all that is fetched

	come    chan *blob            // of which all bytes are there
	commits errgroup.Group        // makes them containerd's
	wrong   atomic.Pointer[error] // what Wrong returns
}

// Begin begins to fetch an image. It returns when all layers are unpacked for the snapshotter. ctx carries containerd's
// namespace. The errors are ErrWhole, ErrHere, or those of fetching; what came in stays for a day.
func Begin(ctx context.Context, c *client.Client, src *registry.Source, snapshotter string) (_ *Image, err error) {
	i := &Image{c: c, src: src, feed: feed.New()}
	if i.image, err = oci.Outline(ctx, src, src.Image); err != nil {
		return nil, err
	}
	whole := slices.ContainsFunc(i.image.Layers, func(l oci.Layer) bool {
		return (l.Kind == oci.LayerGPU || l.Kind == oci.LayerMemory) && (l.MediaType != oci.MediaTypeGPU || l.Digest.Algorithm() != digest.Canonical)
	})
	if whole || i.image.Digest != src.Image.Digest || len(i.blobs()) == 0 {
		return nil, fmt.Errorf("not all GPU state of %s is in blobs, or it is an index of images: %w", src.Ref, ErrWhole)
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
	if err := i.fetch(src.Image, i.image.Config); err != nil { //nolint:contextcheck // i.ctx is made of it
		return nil, err
	}
	if i.store, err = localstore.Of(i.ctx, c); err != nil { //nolint:contextcheck // as above; it knows the store by what was fetched
		return nil, fmt.Errorf("%w: %w", err, ErrWhole)
	}
	if err := i.claim(); err != nil { //nolint:contextcheck // as above
		return nil, err
	}
	if err := i.keep(); err != nil { //nolint:contextcheck // as above
		return nil, err
	}
	if err := i.begin(snapshotter); err != nil { //nolint:contextcheck // as above
		return nil, cmp.Or(context.Cause(i.ctx), err) //nolint:contextcheck // a blob's, which has ended all else
	}
	return i, nil
}

// blobs are those of memory and GPU state, each once: several pieces may have the same content.
func (i *Image) blobs() (all []ocispec.Descriptor) {
	for _, l := range i.image.Layers {
		if l.MediaType == oci.MediaTypeGPU && !slices.ContainsFunc(all, func(d ocispec.Descriptor) bool { return d.Digest == l.Digest }) {
			all = append(all, l.Descriptor())
		}
	}
	return all
}

// layers are what is unpacked, and what else the image has.
func (i *Image) layers() (all []ocispec.Descriptor) {
	for _, l := range i.image.Layers {
		if l.MediaType != oci.MediaTypeGPU {
			all = append(all, l.Descriptor())
		}
	}
	return all
}

// fetch fetches what is wanted at once.
func (i *Image) fetch(all ...ocispec.Descriptor) error {
	group, ctx := errgroup.WithContext(i.ctx)
	for _, d := range all {
		group.Go(func() error {
			return i.src.Fetch(ctx, localstore.Outlasting(i.c), func() *localstore.Store { return i.store }, d)
		})
	}
	return group.Wait()
}

// diffIDs are those of its layers, by which they are unpacked.
func (i *Image) diffIDs() (all []digest.Digest) {
	for _, l := range i.image.Layers {
		if l.DiffID != "" {
			all = append(all, l.DiffID)
		}
	}
	return all
}

// claim makes the directory of the image's blobs, once nobody else fetches an image of its layers: that one's feed would
// be in the same place.
func (i *Image) claim() error {
	all, err := i.store.Beside(directory)
	if err != nil {
		return fmt.Errorf("%w: %w", err, ErrWhole)
	}
	sweep(all)
	for i.lock == nil {
		i.dir, err = i.store.Beside(directory, identity.ChainID(i.diffIDs()).Encoded())
		if errors.Is(err, os.ErrNotExist) { // another has just removed what was empty
			continue
		}
		if err != nil {
			return err
		}
		if i.lock, err = lockDir(i.ctx, i.dir); err != nil {
			return err
		}
	}
	if found, err := localstore.Find(i.ctx, i.c, i.src.Ref); err == nil && found.Target.Digest == i.image.Digest {
		return cmp.Or(i.end(true), ErrHere) // what was fetched so far is of that image
	}
	return nil
}

// sweep removes what programs have left that were killed.
func sweep(all string) {
	left, _ := filepath.Glob(filepath.Join(all, "*"))
	for _, dir := range left {
		f, err := os.Open(dir)
		if err == nil && unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			_ = os.RemoveAll(dir) // the next one tries it again
		}
		f.Close()
	}
}

// lockDir locks a directory until the file is closed. It returns nil if the directory was removed meanwhile.
func lockDir(ctx context.Context, dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			break
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(context.Cause(ctx), f.Close())
		case <-time.After(50 * time.Millisecond):
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), f.Close())
	}
	mine, err := f.Stat()
	if err == nil {
		var now os.FileInfo
		if now, err = os.Stat(dir); err == nil && os.SameFile(mine, now) {
			return f, nil
		}
	}
	f.Close()
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return nil, err
}

// keep has containerd keep all that the image has, from now on, as long as the lease keeps the manifest.
func (i *Image) keep() error {
	m := ocispec.Manifest{Config: i.image.Config}
	for _, l := range i.image.Layers {
		m.Layers = append(m.Layers, l.Descriptor())
	}
	labels := oci.References(&m)
	var fields []string
	for key := range labels {
		fields = append(fields, "labels."+key)
	}
	_, err := i.c.ContentStore().Update(i.ctx, content.Info{Digest: i.image.Digest, Labels: labels}, fields...)
	if err != nil {
		return fmt.Errorf("have containerd keep it: %w", err)
	}
	return nil
}

// begin fetches and unpacks the layers while the blobs come, and serves the feed.
func (i *Image) begin(snapshotter string) error {
	layers := make(chan error, 1)
	i.group.Go(func() error {
		err := i.fetch(i.layers()...)
		layers <- err
		return err
	})
	if err := i.place(); err != nil {
		return err
	}
	i.fetchAll()
	if err := <-layers; err != nil {
		return err
	}
	i.Image = client.NewImage(i.c, cimages.Image{Name: i.src.Ref, Target: i.src.Image})
	if err := localstore.Unpack(i.ctx, i.c, i.Image, snapshotter, i.store); err != nil {
		return err
	}
	top, err := i.topmost(snapshotter)
	if err != nil {
		return err
	}
	return i.feed.Serve(filepath.Dir(top), i.dir)
}

// fetchAll begins to fetch the blobs, by threads of low priority: making the container took up to 40 times as long beside
// them.
func (i *Image) fetchAll() {
	next := make(chan *blob, len(i.early))
	i.come = make(chan *blob, len(i.early))
	for _, b := range i.early {
		next <- b
	}
	close(next)
	threads := min(max(i.src.Parallel-1, 1), len(i.early)) // the layers have one connection
	others := runtime.GOMAXPROCS(0)
	runtime.GOMAXPROCS(others + threads + 1)
	context.AfterFunc(i.ctx, func() { runtime.GOMAXPROCS(others) })
	var fetching sync.WaitGroup
	fetching.Add(threads)
	for range threads {
		i.group.Go(func() error {
			defer fetching.Done()
			withLowPriority()
			for b := range next {
				if err := b.fetch(); err != nil {
					return err
				}
				i.come <- b
			}
			return nil
		})
	}
	go func() {
		fetching.Wait()
		close(i.come)
	}()
	i.commits.Go(func() error {
		withLowPriority()
		return i.commit()
	})
}

// withLowPriority has the goroutine run in a thread of its own, which ends with it.
func withLowPriority() {
	runtime.LockOSThread()
	_ = unix.Setpriority(unix.PRIO_PROCESS, 0, lowPriority) // of this thread; see setpriority(2)
}

// lowPriority is a nice(2) value: beside others of its cgroup, and of its session (sched_autogroup_enabled), such a thread
// gets a tenth of a processor.
const lowPriority = 10

// commit makes all blobs that come containerd's: also after an error, since the next pull need not fetch them. The shim is
// told of the first, or it would wait for all others.
func (i *Image) commit() (err error) {
	for b := range i.come {
		if cerr := b.commit(); cerr != nil {
			i.feed.Fail(cerr)
			err = errors.Join(err, cerr)
		}
	}
	return err
}

// commitAll makes the rest containerd's, by all processors. Nothing is fetched any more.
func (i *Image) commitAll() error {
	for range runtime.NumCPU() {
		i.commits.Go(i.commit)
	}
	return i.commits.Wait()
}

// place makes a place for each blob, and a writer for each that containerd lacks.
func (i *Image) place() error {
	for _, d := range i.blobs() {
		b := &blob{i: i, desc: d, path: filepath.Join(i.dir, d.Digest.Encoded())}
		here, err := b.place()
		if err != nil { // the blobs are on a file system of their own, say
			return fmt.Errorf("make a place for blob %s: %w: %w", d.Digest, err, ErrWhole)
		}
		if here {
			i.feed.Have(b.path, uint64(d.Size))
		} else {
			i.early = append(i.early, b)
		}
	}
	return nil
}

// topmost returns the directory of the image's topmost layer.
func (i *Image) topmost(snapshotter string) (dir string, err error) {
	shots, key := i.c.SnapshotService(snapshotter), "gpuckpt-look-"+rand.Text()
	mounts, err := shots.View(i.ctx, key, identity.ChainID(i.diffIDs()).String())
	if err != nil {
		return "", fmt.Errorf("look at the image's layers: %w", err)
	}
	defer func() { err = errors.Join(err, shots.Remove(context.WithoutCancel(i.ctx), key)) }()
	if len(mounts) == 1 && mounts[0].Type == "overlay" {
		for _, o := range mounts[0].Options {
			if lower, ok := strings.CutPrefix(o, "lowerdir="); ok {
				dir, _, _ = strings.Cut(lower, ":")
				return dir, nil
			}
		}
	}
	return "", fmt.Errorf("the snapshotter %s has no directory for each layer: %w", snapshotter, ErrWhole)
}

// Finish waits until all is here, and gives the image its name. After an error containerd keeps for a day what came.
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
	if err := errors.Join(i.feed.Close(), i.commitAll()); err != nil {
		return err
	}
	if err := localstore.Tag(ctx, i.c, i.src.Ref, i.src.Image); err != nil {
		return err
	}
	return i.end(true)
}

// Wrong returns, after Close, a registry.ErrWrongBytes if a blob had other bytes than those of its digest: a restore that
// read it has failed.
func (i *Image) Wrong() error {
	if wrong := i.wrong.Load(); wrong != nil {
		return *wrong
	}
	return nil
}

// Close ends all that is under way, once what has come is kept.
func (i *Image) Close() error {
	i.cancel()
	_ = i.group.Wait() // Finish has its error, and so has the restore
	if i.come != nil {
		_ = i.commitAll()
	}
	for _, b := range i.early {
		b.w.Close()
	}
	err := errors.Join(i.feed.Close(), i.end(false))
	if i.lock != nil {
		err = errors.Join(err, os.RemoveAll(i.dir), i.lock.Close())
		_ = os.Remove(filepath.Dir(i.dir)) // another image may arrive
	}
	return err
}

// blob is one with memory or GPU state.
type blob struct {
	i    *Image
	desc ocispec.Descriptor
	path string // the shim reads it there
	w    content.Writer
}

// place puts the blob into the image's directory, and reports whether containerd has it.
func (b *blob) place() (here bool, err error) {
	if err = b.i.store.Link(b.i.ctx, b.desc, b.i.dir); err == nil || !errdefs.IsNotFound(err) && !errors.Is(err, os.ErrNotExist) {
		return err == nil, err
	}
	b.w, err = b.i.store.Early(context.WithoutCancel(b.i.ctx), b.desc, b.i.dir) // what has come is kept
	return false, err
}

// fetch fetches the blob, and tells the feed of it.
func (b *blob) fetch() error {
	err := b.i.src.Copy(b.i.ctx, b.w, b.desc, func(bytes uint64) { b.i.feed.Have(b.path, bytes) })
	if err != nil {
		b.i.feed.Fail(err)
	}
	return err
}

// commit makes the blob one of containerd's.
func (b *blob) commit() error {
	err := b.w.Commit(context.WithoutCancel(b.i.ctx), b.desc.Size, b.desc.Digest)
	switch {
	case errdefs.IsAlreadyExists(err):
		return nil
	case errdefs.IsFailedPrecondition(err):
		err = fmt.Errorf("fetch %s: %w: %w", b.desc.Digest, registry.ErrWrongBytes, err)
		b.i.wrong.CompareAndSwap(nil, &err)
	}
	return err
}
