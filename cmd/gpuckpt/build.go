// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

// buildImage builds the image of a source that is none, in a store.
func (v *conversion) buildImage(src *source, store content.Store, answer *conversionAnswer) (none ocispec.Descriptor, _ error) {
	o, err := v.options()
	if err != nil {
		return none, err
	}
	o.Checkpoint = src.flat()
	if err := v.describe(src, &o); err != nil {
		return none, err
	}
	if v.previous != "" {
		previous, err := v.find(v.previous)
		if err != nil {
			return none, fmt.Errorf("--previous: %w", err)
		}
		if previous.image == nil {
			return none, fmt.Errorf("--previous %s: %w", v.previous, oci.ErrNotCheckpoint)
		}
		o.Previous = previous.image
		o.Provider = providers{o.Provider, previous.provider}
	}
	if v.base != "" || o.Base.Digest == "" {
		if err := v.findBase(&o); err != nil {
			return none, err
		}
	}
	result, err := v.progress.build(v.ctx, store, o)
	if err != nil {
		return none, err
	}
	answer.Built, answer.Digest = true, result.Manifest.Digest.String()
	answer.GPUBytes, answer.Bytes = result.GPUBytes, result.Bytes
	answer.WrittenBytes, answer.ReusedBytes = result.Written, result.Reused
	return result.Manifest, nil
}

// find opens what a flag names, until the end.
func (v *conversion) find(name string) (*source, error) {
	p, err := parsePlace(name)
	if err != nil {
		return nil, err
	}
	found, err := p.open(v.ctx, v.dial, &v.daemon)
	if err == nil {
		v.atEnd(found.Close)
	}
	return found, err
}

// describe fills in what the source says of the container, and has of its files.
func (v *conversion) describe(src *source, o *oci.Options) error {
	switch {
	case src.stock != nil:
		o.Provider, o.Base, o.RW = src.provider, src.stock.Base, src.stock.RW
		config, _, err := stockRecord(v.ctx, src)
		if err != nil {
			return err
		}
		o.BaseName = config.RootfsImageName
		o.Annotations = map[string]string{"org.criu.checkpoint.engine.name": "containerd"}
	case src.archive != nil:
		o.BaseName = cmp.Or(src.archive.Config.RootfsImageName, src.archive.Config.RootfsImage)
		o.Annotations = map[string]string{
			annotations.ContainerName:             src.archive.Config.Name,
			"org.criu.checkpoint.rootfsImageName": o.BaseName,
			"org.criu.checkpoint.runtime.name":    src.archive.Config.Runtime,
		}
		rw, err := src.archive.RootFS(v.ctx)
		if err != nil {
			return err
		}
		if rw != nil {
			v.atEnd(rw.Close)
			o.RWTar = rw
		}
	}
	return nil
}

// findBase finds the image the container was made from, by --base or by the name
// that the source has for it.
func (v *conversion) findBase(o *oci.Options) error {
	name := cmp.Or(v.base, o.BaseName)
	if name == "" {
		return errors.New("name the image that the container was made from with --base")
	}
	base, err := v.find(name)
	if err != nil {
		return fmt.Errorf("the container's image (--base names it): %w", err)
	}
	if base.image == nil {
		return fmt.Errorf("--base %s: it is no image", name)
	}
	o.Base = *base.image
	if v.base != "" {
		o.BaseName = base.name
	}
	o.Provider = providers{o.Provider, base.provider}
	return nil
}

// providers reads a blob from the first that has it.
type providers []content.Provider

func (all providers) ReaderAt(ctx context.Context, d ocispec.Descriptor) (_ content.ReaderAt, err error) {
	err = fmt.Errorf("%s: %w", d.Digest, errdefs.ErrNotFound)
	for _, p := range all {
		if p == nil {
			continue
		}
		var r content.ReaderAt
		if r, err = p.ReaderAt(ctx, d); err == nil || !errdefs.IsNotFound(err) {
			return r, err
		}
	}
	return nil, err
}

// build shows how an image is built.
func (p *progress) build(ctx context.Context, store content.Store, o oci.Options) (*oci.Result, error) {
	s := p.step("image")
	o.Progress = s.set
	result, err := oci.Build(ctx, store, o)
	if err != nil {
		s.end("")
		return nil, err
	}
	s.end(fmt.Sprintf("%s stored, %s were there already", size(result.Bytes), size(result.Reused)))
	return result, nil
}
