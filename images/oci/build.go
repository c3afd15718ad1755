// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
)

// Compression of the layers that a checkpoint adds.
type Compression string

// What a layer can be compressed with. The zero value is Zstd.
const (
	Zstd Compression = "zstd"
	Gzip Compression = "gzip"
	None Compression = "none"
)

// Options say what an image is built from.
type Options struct {
	// Checkpoint is what goes into the image. Its Metadata may be nil, see
	// images.OpenWithoutGPU.
	Checkpoint *images.Checkpoint

	// Base is the manifest of the container's image, or an index, from which
	// the manifest for Platform is taken. A base that is a checkpoint image
	// counts without its GPU and CRIU layers. A zero Base builds an image of
	// the checkpoint alone, which can be verified and moved but not run.
	Base ocispec.Descriptor
	// Provider reads Base, RW and Previous; nil: the store that is written to.
	Provider content.Provider
	// BaseName goes into the annotations; it may be empty.
	BaseName string
	// Platform as in "linux/amd64"; empty: this machine's.
	Platform string

	// RW is a layer with the container's writable files, of any media type of a
	// layer; or RWTar reads such a layer as a plain tar archive. At most one.
	RW    *ocispec.Descriptor
	RWTar io.Reader

	// Previous is the manifest of a checkpoint image of the same container: a
	// layer that is the same as one of its is not written, and the GPU state is
	// cut where it was cut then. Layers of it that are not in the store are
	// written again.
	Previous *ocispec.Descriptor

	// Compression, and its Level as the zstd or gzip program counts; 0 is the
	// fastest. The same level gives the same digests with the same version of
	// this package.
	Compression Compression
	Level       int
	// Threads is how many layers are made at once, each on a processor of its
	// own; 0: one for each processor. Each takes about 10 MiB of memory.
	Threads int
	// LayerBytes is what GPU state is cut into: a power of two, 64 MiB or more.
	// 0: Previous's, else by the size of the state, see docs/images.md.
	LayerBytes uint64

	// Annotations go onto the manifest beside this package's own.
	Annotations map[string]string
	// Created is the image's time; zero: that of the checkpoint.
	Created time.Time

	// Progress, if not nil, is told of the bytes of checkpoint files that went
	// into layers, of all there are. The calls do not overlap.
	Progress func(done, total uint64)
}

// Result is what a build made.
type Result struct {
	// Manifest is the image. It has no name yet.
	Manifest ocispec.Descriptor
	// GPUBytes is the size of the GPU state; GPULayers how many layers hold
	// it. What is zero needs none.
	GPUBytes  uint64
	GPULayers int
	// Bytes are the sizes of the layers the checkpoint added, as stored.
	// Reused and Written say how much of it was there and how much is new,
	// among all and among the GPU layers. A layer that the store had under its
	// digest counts as reused, whoever brought it.
	Bytes, Reused, Written uint64
	GPUReused, GPUWritten  uint64
	GPULayersReused        int
	// Base is the size of the base image's layers.
	Base uint64
}

// ErrNotCheckpoint says that an image is no checkpoint image.
var ErrNotCheckpoint = errors.New("no checkpoint image")

// Build writes a checkpoint image into a content store: the layers, those of
// the base image if the store does not have them, the config and the manifest.
// With containerd's store, ctx should carry a lease until the image has a
// name, else the garbage collector may take what is written.
//
// On an error there is no manifest and no unfinished ingest; layers that were
// complete are left to the store's garbage collector, or removed from a Layout.
func Build(ctx context.Context, store content.Store, o Options) (*Result, error) {
	return nil, errors.ErrUnsupported
}
