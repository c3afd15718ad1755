// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"archive/tar"
	"context"
	"fmt"
	"io"
	"time"

	"github.com/gpuckpt/gpuckpt/images"
)

// entry is a file of a layer: bytes of a reader, from an offset.
type entry struct {
	name        string // in images.ImageDir
	from        io.ReaderAt
	offset, len uint64
}

// writeTar writes a layer's archive. It depends on the names and the content
// alone, so that the same content has the same digest. meter counts the bytes read.
func writeTar(ctx context.Context, w io.Writer, entries []entry, meter *images.Meter) error {
	t := tar.NewWriter(w)
	if err := t.WriteHeader(header(images.ImageDir+"/", 0, tar.TypeDir, 0o700)); err != nil {
		return err
	}
	buf := make([]byte, 1<<20)
	for _, e := range entries {
		if err := t.WriteHeader(header(images.ImageDir+"/"+e.name, e.len, tar.TypeReg, 0o600)); err != nil {
			return err
		}
		from := io.NewSectionReader(e.from, int64(e.offset), int64(e.len))
		n, err := io.CopyBuffer(t, meter.Reader(ctx, from), buf)
		if err == nil && n < from.Size() {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return fmt.Errorf("read %s at %d: %w", e.name, e.offset+uint64(n), err)
		}
	}
	return t.Close()
}

func header(name string, size uint64, kind byte, mode int64) *tar.Header {
	return &tar.Header{Typeflag: kind, Name: name, Size: int64(size), Mode: mode, ModTime: time.Unix(0, 0)}
}
