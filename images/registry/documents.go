// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/remotes"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// maxDocument bounds what documents reads at once, in bytes.
const maxDocument = 8 << 20

// documents reads small blobs of a registry into memory: manifests.
type documents struct{ fetcher remotes.Fetcher }

// ReaderAt fetches a blob. Who reads it checks its digest.
func (d documents) ReaderAt(ctx context.Context, desc ocispec.Descriptor) (content.ReaderAt, error) {
	if err := desc.Digest.Validate(); err != nil { // it comes from the registry as well
		return nil, fmt.Errorf("fetch %q: %w", desc.Digest, err)
	}
	r, err := d.fetcher.Fetch(ctx, desc)
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(io.LimitReader(r, maxDocument+1))
	if err = errors.Join(err, r.Close()); err != nil {
		return nil, fmt.Errorf("fetch %s: %w", desc.Digest, err)
	}
	if len(data) > maxDocument {
		return nil, fmt.Errorf("fetch %s: it has more than %d bytes", desc.Digest, maxDocument)
	}
	if got := desc.Digest.Algorithm().FromBytes(data); got != desc.Digest {
		return nil, fmt.Errorf("fetch %s: the registry sent %s", desc.Digest, got)
	}
	return inMemory{bytes.NewReader(data)}, nil
}

type inMemory struct{ *bytes.Reader }

func (inMemory) Close() error { return nil }
