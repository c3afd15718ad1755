// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
)

// Image is what a checkpoint image says of itself. Nothing of it was verified.
type Image struct {
	// Digest of the manifest, and its annotations.
	Digest      digest.Digest     `json:"digest"`
	Annotations map[string]string `json:"annotations,omitempty"`
	// Config of the image.
	Config ocispec.Descriptor `json:"-"`
	// Metadata is gpuckpt.json; without GPU state it has no processes.
	Metadata *images.Metadata `json:"metadata"`
	// BaseName may be empty.
	BaseName string `json:"baseName,omitempty"`
	// LayerBytes is what GPU state and memory were cut into.
	LayerBytes uint64 `json:"layerBytes,omitempty"`
	// Layers, bottom up, and the blobs.
	Layers []Layer `json:"layers"`
}

// Layer is one layer of a checkpoint image, or a blob.
type Layer struct {
	Digest    digest.Digest `json:"digest"`
	DiffID    digest.Digest `json:"diffID,omitempty"` // "" of a blob that is no layer
	MediaType string        `json:"mediaType"`
	// Bytes as stored.
	Bytes uint64 `json:"bytes"`
	// Kind is LayerRW, LayerIndex, LayerMemory, LayerGPU, LayerCRIU, or "base".
	Kind string `json:"kind"`
	// Area and Offset of GPU state and memory.
	Area   string `json:"area,omitempty"`
	Offset uint64 `json:"offset,omitempty"`
}

// Descriptor returns what finds the layer in a store, and what kind it is of.
func (l Layer) Descriptor() ocispec.Descriptor {
	return ocispec.Descriptor{MediaType: l.MediaType, Digest: l.Digest, Size: int64(l.Bytes), Annotations: map[string]string{annotations.Layer: l.Kind}}
}

// LayerBase is the Kind of the base image's layers.
const LayerBase = "base"

// Bytes returns the size of the layers of a kind, as stored.
func (i *Image) Bytes(kind string) (bytes uint64) {
	for _, l := range i.Layers {
		if l.Kind == kind {
			bytes += l.Bytes
		}
	}
	return bytes
}

// Inspect reads the manifest, the config and gpuckpt.json of a checkpoint image, in an index of the
// one for this platform. The error of another image is ErrNotCheckpoint.
func Inspect(ctx context.Context, provider content.Provider, manifest ocispec.Descriptor) (*Image, error) {
	i, err := Outline(ctx, provider, manifest)
	if err != nil {
		return nil, err
	}
	for _, l := range i.Layers {
		if l.Kind != LayerCRIU {
			continue
		}
		if i.Metadata, err = inspectMetadata(ctx, provider, l.Descriptor()); err != nil {
			return nil, fmt.Errorf("inspect %s: %w", manifest.Digest, err)
		}
	}
	return i, nil
}

// Outline is Inspect without the Metadata: it reads no layer.
func Outline(ctx context.Context, provider content.Provider, manifest ocispec.Descriptor) (_ *Image, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("inspect %s: %w", manifest.Digest, err)
		}
	}()
	m, desc, err := manifestOf(ctx, provider, manifest)
	if err != nil {
		return nil, err
	}
	if _, err := criuLayer(&m); err != nil {
		return nil, err
	}
	_, ids, err := readConfig(ctx, provider, &m)
	if err != nil {
		return nil, err
	}
	i := &Image{Digest: desc.Digest, Config: m.Config, Annotations: m.Annotations, BaseName: m.Annotations[annotations.Base]}
	if i.LayerBytes, err = layerBytes(m.Annotations); err != nil {
		return nil, err
	}
	for n, d := range m.Layers {
		l, err := layerOf(d, ids[n])
		if err != nil {
			return nil, fmt.Errorf("layer %d: %w", n, err)
		}
		i.Layers = append(i.Layers, l)
	}
	return i, nil
}

func layerOf(d ocispec.Descriptor, id digest.Digest) (_ Layer, err error) {
	l := Layer{Digest: d.Digest, DiffID: id, MediaType: d.MediaType, Bytes: uint64(d.Size), Kind: cmp.Or(d.Annotations[annotations.Layer], LayerBase)}
	if isState(l.Kind) {
		l.Area = d.Annotations[annotations.Area]
		if l.Offset, err = strconv.ParseUint(d.Annotations[annotations.Offset], 10, 64); err != nil {
			return l, fmt.Errorf("%w: %w", images.ErrDamaged, err)
		}
		// A file of the layer is made by that name, before a signature is looked at.
		if area, _, ok := images.ParsePieceFile(images.PieceFile(l.Area, l.Offset)); !ok || area != l.Area {
			return l, fmt.Errorf("%w: the layer says that it is of %q from %d", images.ErrDamaged, l.Area, l.Offset)
		}
	}
	return l, nil
}

// notFirst says that a layer does not begin with gpuckpt.json.
func notFirst(name string) error {
	return fmt.Errorf("%w: its first file is %s, not %s", images.ErrDamaged, name, images.MetadataName)
}

// inspectMetadata reads gpuckpt.json out of its layer, of which it is the first file.
func inspectMetadata(ctx context.Context, provider content.Provider, layer ocispec.Descriptor) (*images.Metadata, error) {
	r, err := OpenLayer(ctx, provider, layer, nil)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	var m *images.Metadata
	found := errors.New("found")
	err = images.ReadLayer(r, func(name string, _ int64, r io.Reader) (err error) {
		if name != images.MetadataName { // what is before it may have no end
			return notFirst(name)
		}
		if m, err = readMetadata(r); err != nil {
			return err
		}
		return found
	})
	switch {
	case errors.Is(err, found):
		return m, nil
	case err != nil:
		return nil, fmt.Errorf("layer %s: %w", layer.Digest, err)
	}
	return nil, fmt.Errorf("%w: layer %s has no %s", images.ErrDamaged, layer.Digest, images.MetadataName)
}
