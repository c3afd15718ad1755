// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package convert

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

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

// Unpacked is an open checkpoint. Close removes what was unpacked of it.
type Unpacked struct {
	*images.Checkpoint
	dir   string
	blobs []io.Closer
}

// Close closes and removes the files.
func (u *Unpacked) Close() error {
	var errs []error
	for _, b := range u.blobs {
		errs = append(errs, b.Close())
	}
	if u.dir != "" {
		errs = append(errs, os.RemoveAll(u.dir))
	}
	return errors.Join(errs...)
}

// Unpack returns the files of a checkpoint, those of GPU state excepted. It unpacks the layer of an image that has them into
// a temporary directory.
func (s *Source) Unpack(ctx context.Context, progress images.Progress) (*Unpacked, error) {
	if s.Image == nil {
		return &Unpacked{Checkpoint: s.Checkpoint}, signable(s.Checkpoint)
	}
	image, err := oci.Inspect(ctx, s.Provider, *s.Image)
	if err != nil {
		return nil, err
	}
	if err := signable(&images.Checkpoint{Metadata: image.Metadata}); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "gpuckpt-")
	if err != nil {
		return nil, err
	}
	return unpack(ctx, s.Provider, image, dir, progress, oci.LayerMemory, oci.LayerCRIU)
}

// unpack opens what an image has of some kinds. It unpacks layers into an empty directory, which is gone with the Unpacked, or
// after an error. Blobs stay where they are.
func unpack(ctx context.Context, provider content.Provider, image *oci.Image, dir string, progress images.Progress, kinds ...string) (_ *Unpacked, err error) {
	u := &Unpacked{dir: dir}
	defer func() {
		if err != nil {
			err = errors.Join(err, u.Close())
		}
	}()
	meter := progress.Begin("unpack", 0)
	var pieces []images.File
	for _, l := range image.Layers {
		if !slices.Contains(kinds, l.Kind) {
			continue
		}
		if l.MediaType == oci.MediaTypeGPU {
			data, err := provider.ReaderAt(ctx, l.Descriptor())
			if err != nil {
				return nil, err
			}
			u.blobs = append(u.blobs, data)
			if uint64(data.Size()) != l.Bytes {
				return nil, fmt.Errorf("%w: blob %s has %d bytes, not %d", images.ErrDamaged, l.Digest, data.Size(), l.Bytes)
			}
			pieces = append(pieces, images.File{Name: images.PieceFile(l.Area, l.Offset), Path: l.Digest.String(), Bytes: l.Bytes, Data: data})
			continue
		}
		meter.Grow(int64(l.Bytes))
		if err := unpackLayer(ctx, provider, l, dir, meter); err != nil {
			return nil, fmt.Errorf("layer %s: %w", l.Digest, err)
		}
	}
	meter.End("unpacked")
	u.Checkpoint, err = images.OpenParts(dir, pieces)
	return u, err
}

func unpackLayer(ctx context.Context, provider content.Provider, layer oci.Layer, dir string, meter *images.Meter) (err error) {
	data, err := oci.OpenLayer(ctx, provider, layer.Descriptor(), meter)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, data.Close()) }()
	return images.ReadLayer(data, func(name string, _ int64, r io.Reader) error { return writeFile(filepath.Join(dir, name), r) })
}

func writeFile(path string, r io.Reader) (err error) {
	// Two layers may not have a file of the same name.
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = io.Copy(f, r)
	return err
}
