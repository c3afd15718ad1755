// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/pkg/archive/compression"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

// extract unpacks the checkpoint's own layers of an image into a directory, and
// opens and checks what came of it. Only plain files directly in /.gpuckpt are
// taken; anything else in such a layer is refused.
func extract(ctx context.Context, provider content.Provider, image *oci.Image, root string, s *step) (*images.Checkpoint, error) {
	dir := filepath.Join(root, images.ImageDir)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	total := image.Bytes(oci.LayerGPU) + image.Bytes(oci.LayerCRIU)
	for _, l := range image.Layers {
		if l.Kind != oci.LayerGPU && l.Kind != oci.LayerCRIU {
			continue
		}
		if err := extractLayer(ctx, provider, l, dir, func(n int64) { s.add(n, int64(total)) }); err != nil {
			return nil, fmt.Errorf("layer %s: %w", l.Digest, err)
		}
	}
	c, err := images.OpenImage(root)
	if errors.Is(err, images.ErrNoMetadata) {
		return images.Open(dir, images.AllowWithoutGPU)
	}
	if err != nil {
		return nil, err
	}
	return c, images.Check(ctx, c.Areas(), 0, nil)
}

func extractLayer(ctx context.Context, provider content.Provider, l oci.Layer, dir string, progress func(int64)) (err error) {
	data, err := openLayer(ctx, provider, l, progress)
	if err != nil {
		return err
	}
	defer joinClose(&err, data)
	for t := tar.NewReader(data); ; {
		h, err := t.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		name := path.Clean(h.Name)
		if h.Typeflag == tar.TypeDir && name == images.ImageDir {
			continue
		}
		if h.Typeflag != tar.TypeReg || path.Dir(name) != images.ImageDir {
			return fmt.Errorf("%w: it has %q", images.ErrDamaged, h.Name)
		}
		if err := writeNew(filepath.Join(dir, path.Base(name)), t); err != nil {
			return err
		}
	}
}

// writeNew writes a file that must not be there.
func writeNew(name string, r io.Reader) (err error) {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer joinClose(&err, f)
	_, err = io.Copy(f, r)
	return err
}

// openLayer reads a layer as a plain tar archive.
func openLayer(ctx context.Context, provider content.Provider, l oci.Layer, progress func(int64)) (io.ReadCloser, error) {
	data, err := provider.ReaderAt(ctx, ocispec.Descriptor{MediaType: l.MediaType, Digest: l.Digest, Size: int64(l.Bytes)})
	if err != nil {
		return nil, err
	}
	counted := &countedReader{ctx: ctx, r: io.NewSectionReader(data, 0, data.Size()), progress: progress}
	plain, err := compression.DecompressStream(counted)
	if err != nil {
		return nil, errors.Join(err, data.Close())
	}
	return &layerReader{plain, data}, nil
}

type layerReader struct {
	compression.DecompressReadCloser
	data io.Closer
}

func (l *layerReader) Close() error {
	return errors.Join(l.DecompressReadCloser.Close(), l.data.Close())
}

// countedReader tells of what is read, and ends with its context.
type countedReader struct {
	ctx      context.Context
	r        io.Reader
	progress func(int64)
}

func (c *countedReader) Read(p []byte) (int, error) {
	if err := context.Cause(c.ctx); err != nil {
		return 0, err
	}
	n, err := c.r.Read(p)
	if c.progress != nil {
		c.progress(int64(n))
	}
	return n, err
}
