// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/containerd/containerd/v2/core/content"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
)

// Replace writes a checkpoint image with other files in place of gpuckpt.json, CRIU's images
// and what lies beside them; all other layers stay. o.Base is the image; of the other
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
	if config["rootfs"], err = json.Marshal(ocispec.RootFS{Type: "layers", DiffIDs: ids}); err != nil {
		return err
	}
	b.result.Manifest, err = b.writeImage(ctx, m, config)
	return err
}
