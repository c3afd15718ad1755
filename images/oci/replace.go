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
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
)

// Replace writes a checkpoint image with other files in place of gpuckpt.json, CRIU's images
// and what lies beside them; all other layers and blobs stay. o.Base is the image; of the other
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
	if b.Compression == "" { // zstd, but for a layer that is not compressed
		b.Compression = Zstd
		if m.Layers[top].MediaType == None.MediaType() {
			b.Compression = None
		}
	}
	b.result.GPUBytes, _ = strconv.ParseUint(m.Annotations[annotations.GPUState], 10, 64) // it is only told
	for i, l := range m.Layers {
		if i == top {
			continue
		}
		if err := b.copyBlob(ctx, l); err != nil {
			return fmt.Errorf("layer %s: %w", l.Digest, err)
		}
		if kind := l.Annotations[annotations.Layer]; kind != "" {
			b.count(layer{desc: l, kind: kind, reused: true})
		}
	}
	p, done, err := criuPlan(ctx, slices.DeleteFunc(slices.Clone(files), func(f images.File) bool { return f.Pieces != nil }), nil)
	defer done()
	if err != nil {
		return err
	}
	b.meter.Grow(int64(p.to))
	made, err := b.make(ctx, &p, nil)
	if err != nil {
		return err
	}
	b.count(made[0])
	m.Layers[top], ids[top] = made[0].desc, made[0].diffID
	if config["rootfs"], err = json.Marshal(rootfs(ids)); err != nil {
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
	base, err := b.readBase(ctx)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	m := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest}
	var ids []digest.Digest
	for _, l := range base.layers {
		m.Layers, ids = append(m.Layers, l.desc), append(ids, l.diffID)
	}
	if base.config["rootfs"], err = json.Marshal(rootfs(ids)); err != nil {
		return ocispec.Descriptor{}, err
	}
	delete(base.config, "history")
	return b.writeImage(ctx, m, base.config)
}
