// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"

	"github.com/gpuckpt/gpuckpt/images"
)

// Compression of the layers that a checkpoint adds.
type Compression string

// What layers can be compressed with. With Zstd and Gzip GPU state and memory are in layers too. With the zero value, and
// with None, they are in blobs as they are, and need no unpacking anywhere; the zero value is Zstd for a checkpoint without
// GPU state.
const (
	Zstd Compression = "zstd"
	Gzip Compression = "gzip"
	None Compression = "none"
)

// Options say what an image is built from.
type Options struct {
	// Checkpoint goes into the image. Its Metadata may be nil, see images.AllowWithoutGPU.
	Checkpoint *images.Checkpoint

	// Base is the manifest of the container's image, or an index of it; of a checkpoint image the
	// GPU and CRIU layers do not count. A zero Base builds an image that cannot be run.
	Base ocispec.Descriptor
	// Provider reads Base, RW and Previous; nil: the store that is written to.
	Provider content.Provider
	// BaseName goes into the annotations; it may be empty.
	BaseName string

	// RW is a layer with the container's writable files, of any media type of a layer. RWTar reads
	// one as a plain tar archive. At most one of them is set.
	RW    *ocispec.Descriptor
	RWTar io.Reader

	// Previous is the manifest of an earlier checkpoint image of the container: GPU state and memory are cut as
	// it was then, and layers that have not changed are not written again.
	Previous *ocispec.Descriptor

	// Compression, and its Level as the zstd or gzip program counts; 0 is the fastest.
	Compression Compression
	Level       int
	// Threads is how many processors make layers, each one of its own or a part of another's, in up to 80 MiB of memory;
	// 0: all.
	Threads int

	// Memory returns the names of those files with memory, in the directory of a dump, that become blobs; nil: none do.
	Memory func(dir string) (names []string, err error)

	// Annotations go onto the manifest beside this package's own.
	Annotations map[string]string

	// Progress receives the step "image": the bytes of files that went into layers.
	Progress images.Progress
	// Made is called for each layer that is in the store, by several goroutines, and returns at once; nil: nobody asks.
	Made func(ocispec.Descriptor)
	// Discard removes the blobs of a build that fails, for a store without a garbage collector.
	Discard bool

	layers bool // GPU state and memory are in layers
}

// Result is what a build made.
type Result struct {
	// Manifest is the image. It has no name yet.
	Manifest ocispec.Descriptor `json:"-"`
	// GPUBytes is the size of the GPU state, GPULayers how many blobs hold it; zeros need none, nor does state in CRIU's images.
	GPUBytes  uint64 `json:"gpuBytes"`
	GPULayers int    `json:"-"`
	// Bytes are the sizes of what the checkpoint added, as stored. Reused and Written
	// say how much was there and how much is new, of all and of the GPU layers. A layer that the
	// store had under its digest is reused.
	Bytes           uint64 `json:"bytes"`
	Written         uint64 `json:"writtenBytes"`
	Reused          uint64 `json:"reusedBytes"`
	GPUWritten      uint64 `json:"gpuWrittenBytes"`
	GPUReused       uint64 `json:"gpuReusedBytes"`
	GPULayersReused int    `json:"-"`
}

// ErrNotCheckpoint reports that an image is not a checkpoint image.
var ErrNotCheckpoint = errors.New("not a checkpoint image")

// Build writes a checkpoint image into a content store: the layers, those of the base image if the
// store lacks them, the config and the manifest. For containerd's store, ctx should carry a lease
// until the image has a name, against the garbage collector.
//
// On an error there is no manifest and no unfinished ingest. Layers that were complete are left to
// the store's garbage collector, or removed, see Discard.
func Build(ctx context.Context, store content.Store, o Options) (*Result, error) {
	b, err := newBuilder(store, o)
	if err != nil {
		return nil, err
	}
	result, err := b.build(ctx)
	if err != nil {
		b.discard(context.WithoutCancel(ctx))
		return nil, fmt.Errorf("build checkpoint image: %w", err)
	}
	return result, nil
}

type builder struct {
	Options
	store content.Store
	id    string // begins the names of this build's ingests

	memory     []images.File // that becomes blobs
	layerBytes uint64        // what GPU state and memory are cut into: as Previous, else by the size of the state

	processors *semaphore.Weighted // Threads
	encoder    *zstd.Encoder       // for as many

	meter *images.Meter

	mu     sync.Mutex
	result Result
	wrote  []digest.Digest // blobs that the store did not have
}

// Check reports what is wrong with Compression, Level or Threads.
func (o *Options) Check() error {
	if err := o.Compression.check(o.Level); err != nil {
		return err
	}
	if o.Threads < 0 {
		return fmt.Errorf("%d threads: it must be 1 or more, or 0 for one on each processor", o.Threads)
	}
	return nil
}

func newBuilder(store content.Store, o Options) (*builder, error) {
	if err := o.Check(); err != nil {
		return nil, err
	}
	if o.RW != nil && o.RWTar != nil {
		return nil, errors.New("two layers with the container's writable files")
	}
	if o.Provider == nil {
		o.Provider = store
	}
	if o.Compression == "" && o.Checkpoint != nil {
		o.Compression = None
		if len(o.Checkpoint.Areas()) == 0 {
			o.Compression = Zstd
		}
	}
	o.layers = o.Compression == Zstd || o.Compression == Gzip
	o.Threads = cmp.Or(o.Threads, runtime.NumCPU())
	b := &builder{
		Options: o, store: store, id: "gpuckpt-" + rand.Text(), processors: semaphore.NewWeighted(int64(o.Threads)), meter: o.Progress.Begin("image", 0),
	}
	var err error
	b.encoder, err = zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.EncoderLevelFromZstd(max(1, o.Level))),
		zstd.WithEncoderConcurrency(o.Threads), zstd.WithLowerEncoderMem(true))
	return b, err
}

// build is the build, step by step.
func (b *builder) build(ctx context.Context) (*Result, error) {
	meta, err := b.Checkpoint.WithMetadata()
	if err != nil {
		return nil, err
	}
	base, err := b.readBase(ctx)
	if err != nil {
		return nil, err
	}
	previous, err := b.readPrevious(ctx)
	if err != nil {
		return nil, err
	}
	b.chooseMemory(meta)
	if b.layerBytes == 0 {
		most := uint64(mostBlobs)
		if b.layers {
			most = mostLayers
		}
		state := b.Checkpoint.AreaBytes()
		for _, f := range b.memory {
			state += f.Bytes
		}
		b.layerBytes = chooseLayerBytes(state, most)
	}
	for _, l := range base.layers {
		if err := b.copyBlob(ctx, l.desc); err != nil {
			return nil, fmt.Errorf("layer %s of the base image: %w", l.desc.Digest, err)
		}
		b.tell(l.desc)
	}
	rw, err := b.writable(ctx)
	if err != nil {
		return nil, err
	}
	for _, l := range rw {
		b.tell(l.desc)
	}
	made, err := b.checkpointLayers(ctx, meta, previous)
	if err != nil {
		return nil, err
	}
	added := append(rw, made...)
	for _, l := range added {
		b.count(l)
	}
	b.result.GPUBytes = stateBytes(meta.Metadata)
	if b.result.Manifest, err = b.writeManifest(ctx, meta.Metadata, base, added); err != nil {
		return nil, err
	}
	b.meter.End("built")
	return &b.result, nil
}

func (b *builder) tell(d ocispec.Descriptor) {
	if b.Made != nil {
		b.Made(d)
	}
}

// layer is a layer in the store, or a blob.
type layer struct {
	desc   ocispec.Descriptor
	diffID digest.Digest // "" of what is no layer
	reused bool
	kind   string
}

// count adds a layer to the figures.
func (b *builder) count(l layer) {
	r, size, gpu := &b.result, uint64(l.desc.Size), uint64(0)
	if l.kind == LayerGPU {
		gpu = size
		r.GPULayers++
	}
	r.Bytes += size
	if !l.reused {
		r.Written += size
		r.GPUWritten += gpu
		return
	}
	r.Reused += size
	r.GPUReused += gpu
	if gpu > 0 {
		r.GPULayersReused++
	}
}

// discard removes what a failed build has written.
func (b *builder) discard(ctx context.Context) {
	if !b.Discard {
		return
	}
	for _, d := range b.wrote {
		if err := b.store.Delete(ctx, d); err != nil && !errdefs.IsNotFound(err) {
			log.G(ctx).WithError(err).Warn("remove a layer of an image that was not completed")
		}
	}
}
