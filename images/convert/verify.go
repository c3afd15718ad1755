// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package convert

import (
	"context"
	"errors"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/images/sign"
)

// Verify reads every byte of a checkpoint, see oci.Verify; of a source that is no image there are no
// Layers in the report.
func (s *Source) Verify(ctx context.Context, progress images.Progress) (*oci.Report, error) {
	if s.Image != nil {
		return oci.Verify(ctx, s.Provider, *s.Image, progress)
	}
	r := &oci.Report{GPUBytes: s.Checkpoint.AreaBytes()}
	for _, a := range s.Checkpoint.Areas() {
		r.Blocks += len(a.Digests)
	}
	var err error
	if r.Seal, err = sign.Read(s.Checkpoint.Files); r.Seal != nil {
		var m *sign.Manifest
		if m, err = sign.Parse(r.Seal.Manifest); err == nil {
			err = m.Check(ctx, s.Checkpoint.Files)
		}
	} else if errors.Is(err, sign.ErrUnsigned) {
		err = nil
	}
	if err != nil {
		return nil, err
	}
	return r, images.Check(ctx, s.Checkpoint.Areas(), 0, progress)
}
