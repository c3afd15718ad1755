// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
)

// Tar is a layout in a tar archive. Each blob reads its own part of the archive.
type Tar struct {
	file  io.Closer
	index *ocispec.Index
	blobs map[digest.Digest]images.File
}

// maxIndex bounds an archive's index.json, in bytes.
const maxIndex = 8 << 20

// OpenTar opens an archive, which must stay as it is until Close.
func OpenTar(path string) (_ *Tar, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	files, err := images.TarFiles(f, st.Size())
	if err != nil {
		return nil, err
	}
	t := &Tar{file: f, blobs: make(map[digest.Digest]images.File)}
	for _, file := range files {
		if hex, ok := strings.CutPrefix(file.Name, ocispec.ImageBlobsDir+"/"+digest.SHA256.String()+"/"); ok {
			t.blobs[digest.NewDigestFromEncoded(digest.SHA256, hex)] = file
		}
		if file.Name != ocispec.ImageIndexFile || file.Bytes > maxIndex {
			continue
		}
		data, err := io.ReadAll(io.NewSectionReader(file.Data, 0, int64(file.Bytes)))
		if err != nil {
			return nil, err
		}
		if t.index, err = parseIndex(data); err != nil {
			return nil, err
		}
	}
	if t.index == nil {
		return nil, fmt.Errorf("it has no %s: it is not an OCI archive", ocispec.ImageIndexFile)
	}
	return t, nil
}

// Close closes the archive.
func (t *Tar) Close() error { return t.file.Close() }

// Get finds an image by its name; an empty name stands for the only image.
func (t *Tar) Get(name string) (ocispec.Descriptor, error) { return find(t.index, name) }

// ReaderAt reads a blob.
func (t *Tar) ReaderAt(_ context.Context, d ocispec.Descriptor) (content.ReaderAt, error) {
	f, ok := t.blobs[d.Digest]
	if !ok {
		return nil, fmt.Errorf("the archive has no %s: %w", d.Digest, errdefs.ErrNotFound)
	}
	return blob{f.Data.(*io.SectionReader)}, nil
}

// Info says that a blob is there, and its size.
func (t *Tar) Info(_ context.Context, d digest.Digest) (content.Info, error) {
	f, ok := t.blobs[d]
	if !ok {
		return content.Info{}, fmt.Errorf("the archive has no %s: %w", d, errdefs.ErrNotFound)
	}
	return content.Info{Digest: d, Size: int64(f.Bytes)}, nil
}

type blob struct{ *io.SectionReader }

func (blob) Close() error { return nil }
