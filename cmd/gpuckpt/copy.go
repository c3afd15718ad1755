// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"

	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"

	"github.com/gpuckpt/gpuckpt/images/oci"
)

// intoStore copies an image into a store, or builds it there.
func (v *conversion) intoStore(src *source, store content.Store, answer *conversionAnswer) (none ocispec.Descriptor, _ error) {
	if src.image == nil {
		return v.buildImage(src, store, answer)
	}
	manifest := bare(*src.image)
	if _, err := oci.Inspect(v.ctx, src.provider, manifest); err != nil {
		return none, err
	}
	answer.Digest = manifest.Digest.String()
	return manifest, v.copyImage(src.provider, store, manifest)
}

// copiesAtOnce is how many blobs are copied at the same time.
const copiesAtOnce = 4

// copyImage copies an image's blobs, several at a time. Half an image has no
// name, and containerd's lease keeps what is there of it.
func (v *conversion) copyImage(from content.Provider, to content.Store, image ocispec.Descriptor) error {
	children := cimages.FilterPlatforms(cimages.ChildrenHandler(from), platforms.All)
	if _, layout := to.(*oci.Layout); !layout {
		// By these labels containerd's collector follows an image to its blobs.
		children = cimages.SetChildrenMappedLabels(to, children, nil)
	}
	return v.progress.do("copy", "copied", func(s *step) error {
		write := cimages.HandlerFunc(func(ctx context.Context, d ocispec.Descriptor) ([]ocispec.Descriptor, error) {
			data, err := from.ReaderAt(ctx, d)
			if err != nil {
				return nil, err
			}
			defer data.Close()
			counted := &countedReader{ctx: ctx, r: io.NewSectionReader(data, 0, data.Size()), progress: func(n int64) { s.add(n, 0) }}
			err = content.WriteBlob(ctx, to, "gpuckpt-copy-"+d.Digest.String(), counted, d)
			if errdefs.IsAlreadyExists(err) {
				err = nil
			}
			return nil, err
		})
		return cimages.Dispatch(v.ctx, cimages.Handlers(write, children), semaphore.NewWeighted(copiesAtOnce), image)
	})
}

// bare is a descriptor without what an index said of it.
func bare(d ocispec.Descriptor) ocispec.Descriptor {
	return ocispec.Descriptor{MediaType: d.MediaType, Digest: d.Digest, Size: d.Size}
}
