// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/pkg/archive/compression"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
)

// ErrEncrypted reports that a layer can only be read by containerd's stream processors.
var ErrEncrypted = errors.New("the layer is encrypted: pull the image with `gpuckpt image pull --decrypt-key`")

// MediaType returns the media type of a layer so compressed.
func (c Compression) MediaType() string {
	switch c {
	case Gzip:
		return ocispec.MediaTypeImageLayerGzip
	case None:
		return ocispec.MediaTypeImageLayer
	}
	return ocispec.MediaTypeImageLayerZstd
}

func (c Compression) check(level int) error {
	most, ok := map[Compression]int{"": 22, Zstd: 22, None: 22, Gzip: 9}[c]
	switch {
	case !ok:
		return fmt.Errorf("compression %q: it must be %s, %s or %s", c, Zstd, Gzip, None)
	case level < 0 || level > most:
		return fmt.Errorf("compression level %d: it must be 1 to %d, or 0 for the fastest", level, most)
	}
	return nil
}

// maxWindow bounds the memory that a zstd stream may ask for, in bytes: what zstd's level 22 uses
// at most without --ultra --long.
const maxWindow = 128 << 20

// readBytes is what is read of a layer at a time. Each read of containerd's store is a call, which takes 0.6 ms; a zstd
// stream is read three bytes and then at most 128 KiB at a time.
const readBytes = 1 << 20

// Decompress reads a layer of any media type as a plain archive. With no media type
// it goes by how the layer begins.
//
//nolint:contextcheck // DiffCompression looks at nothing of its context.
func Decompress(r io.Reader, mediaType string) (_ io.ReadCloser, err error) {
	kind := "unknown"
	if strings.HasSuffix(mediaType, "+encrypted") {
		return nil, ErrEncrypted
	}
	if mediaType != "" {
		if kind, err = cimages.DiffCompression(context.Background(), mediaType); err != nil {
			return nil, err
		}
	}
	if kind == "unknown" { // Docker's type for plain archives is also used for others
		b := bufio.NewReaderSize(r, readBytes)
		begin, _ := b.Peek(10) // shorter: it is none
		kind = map[compression.Compression]string{compression.Gzip: "gzip", compression.Zstd: "zstd"}[compression.DetectCompression(begin)]
		r = b
	}
	switch kind {
	case "":
		return io.NopCloser(r), nil
	case "gzip":
		return gzip.NewReader(bufio.NewReaderSize(r, readBytes))
	case "zstd":
		d, err := zstd.NewReader(bufio.NewReaderSize(r, readBytes),
			zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderLowmem(true))
		if err != nil {
			return nil, err
		}
		return d.IOReadCloser(), nil
	}
	return nil, fmt.Errorf("layers of the media type %s are not supported", mediaType)
}

// OpenLayer opens a layer as a plain archive, until ctx ends. meter counts the bytes as stored.
func OpenLayer(ctx context.Context, provider content.Provider, layer ocispec.Descriptor, meter *images.Meter) (io.ReadCloser, error) {
	data, err := provider.ReaderAt(ctx, layer)
	if err != nil {
		return nil, missing("layer "+layer.Digest.String(), err)
	}
	plain, err := Decompress(meter.Reader(ctx, io.NewSectionReader(data, 0, data.Size())), layer.MediaType)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%w: layer %s: %w", images.ErrDamaged, layer.Digest, err), data.Close())
	}
	return &openLayer{plain, data}, nil
}

type openLayer struct {
	io.ReadCloser
	data io.Closer
}

func (l *openLayer) Close() error { return errors.Join(l.ReadCloser.Close(), l.data.Close()) }
