// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package convert

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	metadata "github.com/checkpoint-restore/checkpointctl/lib"
	"github.com/containerd/containerd/v2/core/content"
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
		root, err := v.beside()
		if err != nil {
			return err
		}
		if contents.Checkpoint, err = extract(ctx, s.Provider, image, root, v.Progress); err != nil {
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

// extract unpacks the checkpoint's own layers of an image into a directory, opens and checks them.
func extract(ctx context.Context, provider content.Provider, image *oci.Image, root string, progress images.Progress) (*images.Checkpoint, error) {
	dir := filepath.Join(root, images.ImageDir)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	meter := progress.Begin("unpack", image.Bytes(oci.LayerMemory)+image.Bytes(oci.LayerGPU)+image.Bytes(oci.LayerCRIU))
	for _, l := range image.Layers {
		if !slices.Contains([]string{oci.LayerMemory, oci.LayerGPU, oci.LayerCRIU}, l.Kind) {
			continue // the index too: what it points to has the name of the pointer here
		}
		unpack := extractLayer
		if l.MediaType == oci.MediaTypeGPU {
			unpack = extractBlob
		}
		if err := unpack(ctx, provider, l, dir, meter); err != nil {
			return nil, fmt.Errorf("layer %s: %w", l.Digest, err)
		}
	}
	meter.End("unpacked")
	c, err := images.OpenImage("", root)
	if err != nil {
		return nil, err
	}
	return c, images.Check(ctx, c.Areas(), 0, progress)
}

func extractLayer(ctx context.Context, provider content.Provider, layer oci.Layer, dir string, meter *images.Meter) (err error) {
	data, err := oci.OpenLayer(ctx, provider, layer.Descriptor(), meter)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, data.Close()) }()
	return images.ReadLayer(data, func(name string, _ int64, r io.Reader) error { return writeFile(filepath.Join(dir, name), r) })
}

// extractBlob makes a blob the file that would be in a layer.
func extractBlob(ctx context.Context, provider content.Provider, blob oci.Layer, dir string, meter *images.Meter) error {
	ra, err := provider.ReaderAt(ctx, blob.Descriptor())
	if err != nil {
		return err
	}
	defer ra.Close()
	return writeFile(filepath.Join(dir, images.PieceFile(blob.Area, blob.Offset)), meter.Reader(ctx, content.NewReader(ra)))
}

func writeFile(path string, r io.Reader) (err error) {
	// Two layers may not have a file of the same name.
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = io.Copy(f, r)
	return err
}
