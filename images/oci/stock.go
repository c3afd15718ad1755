// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"context"
	"errors"
	"io"

	"github.com/containerd/containerd/v2/core/content"
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
	return nil, errors.ErrUnsupported
}

// TarFiles lists the files of an uncompressed tar archive that lie directly in
// a directory, "" for its root, without copying them: each reads its part of
// the archive. Files elsewhere in the archive are left out. An archive is
// refused, images.ErrDamaged, whose names are absolute or have "..", which has
// the same name twice, is cut short, or has anything but plain files and
// directories where the files are.
func TarFiles(archive io.ReaderAt, size int64, dir string) ([]images.File, error) {
	return nil, errors.ErrUnsupported
}
