// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/containerd/containerd/v2/core/content"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/archive"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

// intoKubernetes writes an archive as the kubelet keeps them.
func (v *conversion) intoKubernetes(src *source, file string) (err error) {
	contents := archive.Contents{Checkpoint: src.flat(), Spec: []byte("{}")}
	switch {
	case src.image != nil:
		image, err := oci.Inspect(v.ctx, src.provider, *src.image)
		if err != nil {
			return err
		}
		root, err := v.beside(file)
		if err != nil {
			return err
		}
		if err := v.progress.do("unpack", "unpacked", func(s *step) (err error) {
			contents.Checkpoint, err = extract(v.ctx, src.provider, image, root, s)
			return err
		}); err != nil {
			return err
		}
		contents.Config = archive.Config{
			Name: image.Annotations[annotations.ContainerName], RootfsImageName: image.BaseName, RootfsImage: image.BaseName,
			Runtime: image.Annotations["org.criu.checkpoint.runtime.name"], CheckpointedAt: image.Metadata.Created,
		}
		for _, l := range image.Layers {
			if l.Kind == oci.LayerRW {
				contents.Layers = append(contents.Layers, src.layer(l))
			}
		}
	case src.stock != nil:
		if contents.Config, contents.Spec, err = stockRecord(v.ctx, src); err != nil {
			return err
		}
		if rw := src.stock.RW; rw != nil {
			contents.Layers = []archive.Layer{src.layer(oci.Layer{Digest: rw.Digest, MediaType: rw.MediaType, Bytes: uint64(rw.Size)})}
		}
	case src.archive != nil:
		return errors.New("the source is one already")
	}
	return v.progress.do("archive", "written", func(s *step) error {
		return archive.Write(v.ctx, file, contents, func(n uint64) { s.add(int64(n), 0) })
	})
}

// layer opens a layer of the source's for an archive.
func (s *source) layer(l oci.Layer) archive.Layer {
	return func(ctx context.Context) (io.ReadCloser, error) { return openLayer(ctx, s.provider, l, nil) }
}

// stockRecord reads the record of the container that a checkpoint of containerd's
// holds: what it says of the container, and its OCI spec.
func stockRecord(ctx context.Context, src *source) (config archive.Config, spec json.RawMessage, err error) {
	spec = []byte("{}")
	data, err := content.ReadBlob(ctx, src.provider, src.index)
	if err != nil {
		return config, nil, fmt.Errorf("read the checkpoint's index: %w", err)
	}
	var index ocispec.Index
	if err := json.Unmarshal(data, &index); err != nil {
		return config, nil, fmt.Errorf("%w: the checkpoint's index: %w", images.ErrDamaged, err)
	}
	// Clients write the name in either of two places.
	config.RootfsImageName = cmp.Or(index.Annotations[ocispec.AnnotationRefName], index.Annotations["image.name"])
	config.Runtime = index.Annotations["io.containerd.checkpoint.runtime"]
	config.RootfsImage = config.RootfsImageName
	config.RootfsImageRef = src.stock.Base.Digest.String()
	if m := src.stock.Checkpoint.Metadata; m != nil {
		config.CheckpointedAt = m.Created
	}
	if src.stock.RuntimeName.Digest != "" {
		name, err := content.ReadBlob(ctx, src.provider, src.stock.RuntimeName)
		if err != nil {
			return config, nil, fmt.Errorf("read the runtime's name: %w", err)
		}
		config.Runtime = string(name)
	}
	if src.stock.Config.Digest == "" {
		return config, spec, nil
	}
	if data, err = content.ReadBlob(ctx, src.provider, src.stock.Config); err != nil {
		return config, nil, fmt.Errorf("read the container's record: %w", err)
	}
	var any anypb.Any
	if err := proto.Unmarshal(data, &any); err != nil {
		return config, nil, fmt.Errorf("%w: the container's record: %w", images.ErrDamaged, err)
	}
	if json.Valid(any.GetValue()) {
		spec = any.GetValue()
	}
	return config, spec, nil
}
