// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
)

// Stock is a checkpoint as containerd itself stores it (`ctr containers
// checkpoint`): an index of raw blobs.
type Stock struct {
	// Checkpoint reads its files where they lie in the archive; it is good
	// until Close. Without GPU state its Metadata is nil.
	Checkpoint *images.Checkpoint
	// Base is the container's image; a zero descriptor when the checkpoint was
	// made without (--image).
	Base ocispec.Descriptor
	// RW is the layer of the container's writable files, nil without (--rw).
	RW *ocispec.Descriptor
	// Config is the container's record, a containers.v1 message; zero without.
	Config ocispec.Descriptor
	// RuntimeName is the blob with the runtime's name; zero without.
	RuntimeName ocispec.Descriptor

	close func() error
}

// Close closes the archive.
func (s *Stock) Close() error { return s.close() }

// OpenStock opens a checkpoint that containerd made. It copies nothing. It is
// ErrNotCheckpoint if the index has no archive of CRIU's.
func OpenStock(ctx context.Context, provider content.Provider, index ocispec.Descriptor) (*Stock, error) {
	if !cimages.IsIndexType(index.MediaType) {
		return nil, fmt.Errorf("%w: %s is of the type %s", ErrNotCheckpoint, index.Digest, index.MediaType)
	}
	data, err := document(ctx, provider, index)
	if err != nil {
		return nil, err
	}
	var ix ocispec.Index
	if err := json.Unmarshal(data, &ix); err != nil {
		return nil, fmt.Errorf("%w: index %s: %w", images.ErrDamaged, index.Digest, err)
	}
	s := &Stock{}
	var archive *ocispec.Descriptor
	for _, d := range ix.Manifests {
		switch {
		case d.MediaType == cimages.MediaTypeContainerd1Checkpoint:
			archive = &d
		case d.MediaType == cimages.MediaTypeContainerd1CheckpointConfig:
			s.Config = d
		case d.MediaType == cimages.MediaTypeContainerd1CheckpointRuntimeName:
			s.RuntimeName = d
		case cimages.IsLayerType(d.MediaType):
			s.RW = &d
		case cimages.IsManifestType(d.MediaType), cimages.IsIndexType(d.MediaType):
			s.Base = d
		}
	}
	if archive == nil {
		return nil, fmt.Errorf("%w: index %s has no archive of the type %s; was it made with --task?", ErrNotCheckpoint, index.Digest, cimages.MediaTypeContainerd1Checkpoint)
	}
	ra, err := provider.ReaderAt(ctx, *archive)
	if err != nil {
		return nil, missing(archive.Digest.String(), err)
	}
	files, err := TarFiles(ra, ra.Size(), "")
	if err == nil {
		s.Checkpoint, err = images.OpenFiles(files, images.AllowWithoutGPU)
	}
	if err != nil {
		ra.Close()
		return nil, fmt.Errorf("checkpoint archive %s: %w", archive.Digest, err)
	}
	s.close = ra.Close
	return s, nil
}

// TarFiles lists the files of an uncompressed tar archive that lie directly in
// a directory, "" for its root, without copying them: each reads its part of
// the archive. Files elsewhere in the archive are left out. An archive is
// refused, images.ErrDamaged, whose names are absolute or have "..", which has
// the same name twice, is cut short, or has anything but plain files and
// directories where the files are.
func TarFiles(archive io.ReaderAt, size int64, dir string) ([]images.File, error) {
	at := &offsetReader{r: io.NewSectionReader(archive, 0, size)}
	seen := make(map[string]bool)
	var files []images.File
	for t := tar.NewReader(at); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return files, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%w: archive: %w", images.ErrDamaged, err)
		}
		name := path.Clean(h.Name)
		if inside := path.Dir(name) == path.Clean(dir); !inside && within(name) {
			continue // other files of the archive are not this function's
		}
		if err := plain(h); err != nil {
			return nil, err
		}
		if h.Typeflag == tar.TypeDir {
			continue
		}
		if seen[name] {
			return nil, fmt.Errorf("%w: archive: %q is there twice", images.ErrDamaged, h.Name)
		}
		seen[name] = true
		// The reader stands where the file's content begins.
		begin := at.at
		if h.Size > size-begin {
			return nil, fmt.Errorf("%w: archive: %q is truncated", images.ErrDamaged, h.Name)
		}
		files = append(files, images.File{
			Name: path.Base(name), Path: h.Name + " in the archive", Bytes: uint64(h.Size),
			Data: io.NewSectionReader(archive, begin, h.Size),
		})
	}
}

// within says whether a cleaned name stays within the archive.
func within(name string) bool {
	return !path.IsAbs(name) && name != ".." && !strings.HasPrefix(name, "../")
}

// offsetReader knows where it is. It can seek, so that a tar.Reader skips what
// is not read.
type offsetReader struct {
	r  *io.SectionReader
	at int64
}

func (o *offsetReader) Read(p []byte) (int, error) {
	n, err := o.r.Read(p)
	o.at += int64(n)
	return n, err
}

func (o *offsetReader) Seek(offset int64, whence int) (int64, error) {
	at, err := o.r.Seek(offset, whence)
	if err == nil {
		o.at = at
	}
	return at, err
}
