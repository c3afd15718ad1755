// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"context"
	"errors"

	"github.com/containerd/containerd/v2/core/content"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Report is what Verify has read.
type Report struct {
	// Layers and their Bytes, as stored; GPU state in Blocks of GPUBytes.
	Layers   int
	Bytes    uint64
	Blocks   int
	GPUBytes uint64
}

// Verify reads every byte of a checkpoint image: that each blob has its digest
// and each layer its diff_id, that the checkpoint's layers hold plain files
// where they belong and nothing else, that gpuckpt.json is whole and of a known
// schema, and that each block of GPU state has its digest. It writes nothing and
// holds no layer in memory. progress, if not nil, is told of the bytes of blobs
// that were read, of all there are.
//
// The error joins all that is wrong, up to 32; each names the blob or file, and
// for GPU state the area and block. They are images.ErrDamaged,
// images.ErrSchema, images.ErrMalformed, ErrNotCheckpoint, or those of reading.
func Verify(ctx context.Context, provider content.Provider, manifest ocispec.Descriptor, progress func(done, total uint64)) (*Report, error) {
	return nil, errors.ErrUnsupported
}
