// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"context"
	"errors"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
)

// Image is what a checkpoint image says of itself; nothing of it was verified.
type Image struct {
	// Digest of the manifest, and its annotations.
	Digest      digest.Digest     `json:"digest"`
	Annotations map[string]string `json:"annotations,omitempty"`
	// Metadata is gpuckpt.json; nil in an image without GPU state.
	Metadata *images.Metadata `json:"metadata,omitempty"`
	// BaseName may be empty.
	BaseName string `json:"baseName,omitempty"`
	// LayerBytes is what the GPU state was cut into.
	LayerBytes uint64 `json:"layerBytes,omitempty"`
	// Layers, bottom up.
	Layers []Layer `json:"layers"`
}

// Layer is one layer of a checkpoint image.
type Layer struct {
	Digest    digest.Digest `json:"digest"`
	DiffID    digest.Digest `json:"diffID"`
	MediaType string        `json:"mediaType"`
	// Bytes as stored.
	Bytes uint64 `json:"bytes"`
	// Kind is LayerRW, LayerGPU, LayerCRIU, or "base".
	Kind string `json:"kind"`
	// Area and Offset of a GPU layer.
	Area   string `json:"area,omitempty"`
	Offset uint64 `json:"offset,omitempty"`
}

// LayerBase is the Kind of the base image's layers.
const LayerBase = "base"

// Bytes gives the size of the layers of a kind, as stored.
func (i *Image) Bytes(kind string) (bytes uint64) {
	for _, l := range i.Layers {
		if l.Kind == kind {
			bytes += l.Bytes
		}
	}
	return bytes
}

// Inspect reads the manifest, the config and gpuckpt.json of a checkpoint image,
// or of the one for this platform in an index. It is ErrNotCheckpoint if the
// image is none.
func Inspect(ctx context.Context, provider content.Provider, manifest ocispec.Descriptor) (*Image, error) {
	return nil, errors.ErrUnsupported
}

// Comparison is what a checkpoint image shares with a previous one.
type Comparison struct {
	// Layers are all of the checkpoint's own layers, Bytes their sizes as
	// stored; Shared are those of them that the previous image has too.
	Layers, SharedLayers       int
	Bytes, SharedBytes         uint64
	GPULayers, SharedGPULayers int
	GPUBytes, SharedGPUBytes   uint64
}

// Compare says what a push of i need not send where previous is.
func (i *Image) Compare(previous *Image) Comparison {
	return Comparison{}
}
