// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
)

// Replace writes a checkpoint image with other files in place of gpuckpt.json, CRIU's images
// and what lies beside them; all other layers but the anchor stay. o.Base is the image; of the other
// options Provider, Compression, Level, Progress and Discard count. It leaves on an error
// what Build leaves.
func Replace(ctx context.Context, store content.Store, o Options, files []images.File) (*Result, error) {
	b, err := newBuilder(store, o)
	if err != nil {
		return nil, err
	}
	if err := b.replace(ctx, files); err != nil {
		b.discard(context.WithoutCancel(ctx))
		return nil, fmt.Errorf("build checkpoint image: %w", err)
	}
	b.meter.End("built")
	return &b.result, nil
}

func (b *builder) replace(ctx context.Context, files []images.File) error {
	m, config, ids, err := readImage(ctx, b.Provider, b.Base)
	if err != nil {
		return err
	}
	top, err := criuLayer(&m)
	if err != nil {
		return err
	}
	b.result.GPUBytes, _ = strconv.ParseUint(m.Annotations[annotations.GPUState], 10, 64) // it is only told
	anchored := slices.IndexFunc(m.Layers[:top], func(l ocispec.Descriptor) bool { return l.Annotations[annotations.Layer] == LayerAnchor })
	for i, l := range m.Layers {
		if i == top || i == anchored {
			continue
		}
		if err := b.copyBlob(ctx, l); err != nil {
			return fmt.Errorf("layer %s: %w", l.Digest, err)
		}
		if kind := l.Annotations[annotations.Layer]; kind != "" {
			b.count(layer{desc: l, kind: kind, reused: true})
		}
	}
	p, done, err := criuPlan(&images.Checkpoint{Files: files})
	defer done()
	if err != nil {
		return err
	}
	b.meter.Grow(int64(p.to))
	made, err := b.makeLayer(ctx, &p, nil)
	if err != nil {
		return err
	}
	b.count(*made)
	m.Layers[top], ids[top] = made.desc, made.diffID
	if anchored >= 0 { // by what is above it
		size, err := layerBytes(m.Annotations)
		if err != nil {
			return err
		}
		var above []layer
		for i := anchored + 1; i <= top; i++ {
			above = append(above, layer{desc: m.Layers[i], diffID: ids[i]})
		}
		if made, err = b.anchor(ctx, size, above); err != nil {
			return err
		}
		b.count(*made)
		m.Layers[anchored], ids[anchored] = made.desc, made.diffID
	}
	if config["rootfs"], err = json.Marshal(ocispec.RootFS{Type: "layers", DiffIDs: ids}); err != nil {
		return err
	}
	b.result.Manifest, err = b.writeImage(ctx, m, config)
	return err
}

// Below writes an image of the layers below the checkpoint in an image: the base image's and those
// of the container's writable files. image is in the store; its layers need not be.
func Below(ctx context.Context, store content.Store, image ocispec.Descriptor) (ocispec.Descriptor, error) {
	b, err := newBuilder(store, Options{Base: image})
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	base, err := b.readBase(ctx, LayerGPU, LayerCRIU) // the anchor is below the layers of GPU state
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	m := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest}
	rootfs := ocispec.RootFS{Type: "layers"}
	for _, l := range base.layers {
		m.Layers, rootfs.DiffIDs = append(m.Layers, l.desc), append(rootfs.DiffIDs, l.diffID)
	}
	if base.config["rootfs"], err = json.Marshal(rootfs); err != nil {
		return ocispec.Descriptor{}, err
	}
	delete(base.config, "history")
	return b.writeImage(ctx, m, base.config)
}
