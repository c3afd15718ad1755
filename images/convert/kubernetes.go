// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package convert

import (
	"context"
	"errors"
	"io"

	metadata "github.com/checkpoint-restore/checkpointctl/lib"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/archive"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

func (v *conversion) intoKubernetes(ctx context.Context) (err error) {
	if v.Sign != nil {
		return errors.New("a Kubernetes archive is not signed on its way: sign the source, or an image")
	}
	contents := archive.Contents{Checkpoint: v.src.Checkpoint, Spec: []byte("{}")}
	switch s := v.src; {
	case s.Image != nil:
		image, err := oci.Inspect(ctx, s.Provider, *s.Image)
		if err != nil {
			return err
		}
		dir, err := v.beside()
		if err != nil {
			return err
		}
		u, err := unpack(ctx, s.Provider, image, dir, v.Progress, oci.LayerMemory, oci.LayerGPU, oci.LayerCRIU)
		if err != nil {
			return err
		}
		defer u.Close()
		contents.Checkpoint = u.Checkpoint
		if err := images.Check(ctx, u.Areas(), 0, v.Progress); err != nil {
			return err
		}
		contents.Config = archive.Config{
			Name: image.Annotations[annotations.ContainerName], RootfsImageName: image.BaseName, RootfsImage: image.BaseName,
			OCIRuntime: image.Annotations[metadata.CheckpointAnnotationRuntimeName], CheckpointedAt: image.Metadata.Created,
		}
		for _, l := range image.Layers {
			if l.Kind == oci.LayerRW {
				contents.Layers = append(contents.Layers, s.layer(l.Descriptor()))
			}
		}
	case s.containerd != nil:
		if contents.Config, contents.Spec, err = s.containerd.Record(ctx); err != nil {
			return err
		}
		if rw := s.containerd.RW; rw != nil {
			contents.Layers = []archive.Layer{s.layer(*rw)}
		}
	case s.archive != nil:
		return errors.New("the source is a Kubernetes archive already")
	}
	return archive.Write(ctx, v.to.Path, contents, v.Progress)
}

func (s *Source) layer(d ocispec.Descriptor) archive.Layer {
	return func(ctx context.Context) (io.ReadCloser, error) { return oci.OpenLayer(ctx, s.Provider, d, nil) }
}
