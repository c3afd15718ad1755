// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package convert

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/containerd/containerd/v2/core/content"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/images/sign"
)

// errOldDigests refuses to sign what a signature could not cover.
var errOldDigests = errors.New("its GPU state has digests that prove nothing (schema version 1): take the checkpoint again")

// SignDump signs a dump where it lies. On an error it is as it was, or has no signature.
func SignDump(ctx context.Context, dir string, with sign.Sign) error {
	c, err := OpenDump(dir)
	if err != nil {
		return err
	}
	if err := signable(c); err != nil {
		return err
	}
	var plain bool
	if plain = c.Metadata == nil; plain {
		if c, err = c.WithMetadata(); err != nil {
			return err
		}
	}
	files, err := sign.Add(ctx, c.Files, with)
	if err != nil {
		return err
	}
	if err := sign.Save(dir, files); err != nil || !plain {
		return err
	}
	return images.WriteMetadata(dir, c.Metadata)
}

// signable refuses a checkpoint whose GPU state a signature would not cover.
func signable(c *images.Checkpoint) error {
	if c.Metadata != nil && !c.Metadata.ProvesGPUState() {
		return errOldDigests
	}
	return nil
}

// signed returns the checkpoint with a signature, if one is asked for.
func (v *conversion) signed(ctx context.Context, c *images.Checkpoint) (*images.Checkpoint, error) {
	if v.Sign == nil {
		return c, nil
	}
	if err := signable(c); err != nil {
		return nil, err
	}
	with, err := c.WithMetadata()
	if err != nil {
		return nil, err
	}
	signed := *with
	signed.Files, err = sign.Add(ctx, with.Files, v.Sign)
	return &signed, err
}

// signImage writes the source, an image, with a signature.
func (v *conversion) signImage(ctx context.Context, store content.Store, o oci.Options) (none ocispec.Descriptor, _ error) {
	files, err := v.src.Unpack(ctx, v.Progress)
	if err != nil {
		return none, err
	}
	v.atEnd(files.Close)
	if files.Files, err = sign.Add(ctx, files.Files, v.Sign); err != nil {
		return none, err
	}
	o.Base, o.Provider = *v.src.Image, v.src.Provider
	built, err := oci.Replace(ctx, store, o, files.Files)
	if err != nil {
		return none, err
	}
	v.result.Built, v.result.Digest, v.result.Result = true, built.Manifest.Digest.String(), built
	return built.Manifest, nil
}

// Unpacked are files of a checkpoint, without those of GPU state. Close removes what was
// unpacked of them.
type Unpacked struct {
	Files []images.File
	dir   string
	open  []io.Closer
}

// Close closes and removes the files.
func (u *Unpacked) Close() error {
	var errs []error
	for _, blob := range u.open {
		errs = append(errs, blob.Close())
	}
	if u.dir != "" {
		errs = append(errs, os.RemoveAll(u.dir))
	}
	return errors.Join(errs...)
}

// Unpack returns the files of a checkpoint, those of GPU state excepted. It unpacks those of
// an image into a temporary directory.
func (s *Source) Unpack(ctx context.Context, progress images.Progress) (_ *Unpacked, err error) {
	if s.Image == nil {
		return &Unpacked{Files: s.Checkpoint.Files}, signable(s.Checkpoint)
	}
	image, err := oci.Inspect(ctx, s.Provider, *s.Image)
	if err != nil {
		return nil, err
	}
	if err := signable(&images.Checkpoint{Metadata: image.Metadata}); err != nil {
		return nil, err
	}
	u := new(Unpacked)
	if u.dir, err = os.MkdirTemp("", "gpuckpt-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, u.Close())
		}
	}()
	meter := progress.Begin("unpack", image.Bytes(oci.LayerCRIU))
	for _, l := range image.Layers {
		if l.Kind == oci.LayerCRIU {
			if err := extractLayer(ctx, s.Provider, l, u.dir, meter); err != nil {
				return nil, fmt.Errorf("layer %s: %w", l.Digest, err)
			}
		}
	}
	meter.End("unpacked")
	if u.Files, err = images.ListDirs(u.dir); err == nil {
		err = s.memory(ctx, image, u)
	}
	return u, err
}

// memory adds the files of memory that an image has in blobs, which stay where they are.
func (s *Source) memory(ctx context.Context, image *oci.Image, u *Unpacked) error {
	pieces := make(map[string]images.Location)
	for _, l := range image.Layers {
		if l.Kind != oci.LayerMemory {
			continue
		}
		data, err := s.Provider.ReaderAt(ctx, l.Descriptor())
		if err != nil {
			return err
		}
		u.open = append(u.open, data)
		pieces[l.Area] = append(pieces[l.Area], images.Piece{Path: l.Digest.String(), Data: data, Offset: l.Offset, Bytes: l.Bytes})
	}
	for name, all := range pieces {
		f, err := images.InPieces(name, all)
		if err != nil {
			return err
		}
		u.Files = append(u.Files, f)
	}
	return nil
}
