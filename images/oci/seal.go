// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/containerd/containerd/v2/core/content"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/sign"
)

// ReadSeal reads the manifest and the signatures of a checkpoint image, nil if it has no signature.
// Nothing is compared with the manifest. It reads the layer with CRIU's images up to the last of
// them: all of it where there is none.
func ReadSeal(ctx context.Context, provider content.Provider, image *Image) (*sign.Seal, error) {
	found := new(sign.Seal)
	for _, l := range image.Layers {
		if l.Kind != LayerCRIU {
			continue
		}
		if err := readSeal(ctx, provider, l, found); err != nil {
			return nil, fmt.Errorf("layer %s: %w", l.Digest, err)
		}
	}
	if found.Manifest == nil || len(found.Signatures) == 0 {
		return nil, nil
	}
	return found, nil
}

func readSeal(ctx context.Context, provider content.Provider, l Layer, found *sign.Seal) error {
	r, err := OpenLayer(ctx, provider, l.Descriptor(), nil)
	if err != nil {
		return err
	}
	defer r.Close()
	enough := errors.New("enough")
	err = images.ReadLayer(r, func(name string, size int64, r io.Reader) error {
		if !sign.IsSeal(name) {
			if len(found.Signatures) > 0 { // they lie side by side
				return enough
			}
			return nil
		}
		return found.Take(name, size, r)
	})
	if errors.Is(err, enough) {
		return nil
	}
	return err
}
