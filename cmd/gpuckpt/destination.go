// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"

	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	ociarchive "github.com/containerd/containerd/v2/core/images/archive"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images/oci"
)

// intoContainerd writes into containerd, under its name at the end.
func (v *conversion) intoContainerd(src *source, to place, answer *conversionAnswer) error {
	c, err := v.dial()
	if err != nil {
		return err
	}
	manifest, err := v.intoStore(src, c.ContentStore(), answer)
	if err != nil {
		return err
	}
	return tag(v.ctx, c, cimages.Image{Name: to.ref, Target: manifest})
}

// intoLayout writes into a layout, which is made if there is none.
func (v *conversion) intoLayout(src *source, dir, name string, answer *conversionAnswer) (err error) {
	if name == "" {
		return errors.New("the image needs a name: write it after the directory, DIR@example.com/job:1")
	}
	_, serr := os.Stat(dir)
	layout, err := oci.OpenLayout(dir)
	if err != nil {
		return err
	}
	defer joinClose(&err, layout)
	defer func() {
		if err != nil && errors.Is(serr, os.ErrNotExist) {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	manifest, err := v.intoStore(src, layout, answer)
	if err != nil {
		return err
	}
	return layout.Tag(v.ctx, name, manifest)
}

// intoArchive writes an OCI archive, by way of a layout beside it where there is
// no image yet.
func (v *conversion) intoArchive(src *source, to place, answer *conversionAnswer) (err error) {
	if to.ref == "" {
		return errors.New("the image needs a name: write it after the file, FILE@example.com/job:1")
	}
	provider := src.provider
	var manifest ocispec.Descriptor
	if src.image != nil {
		manifest = bare(*src.image)
		answer.Digest = manifest.Digest.String()
	} else {
		dir, err := v.beside(to.path)
		if err != nil {
			return err
		}
		layout, err := oci.OpenLayout(dir)
		if err != nil {
			return err
		}
		v.atEnd(layout.Close)
		if manifest, err = v.intoStore(src, layout, answer); err != nil {
			return err
		}
		provider = layout
	}
	out, err := os.CreateTemp(filepath.Dir(to.path), "."+filepath.Base(to.path)+".")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = out.Close() // it may be closed
			err = errors.Join(err, os.Remove(out.Name()))
		}
	}()
	err = v.progress.do("archive", "written", func(s *step) error {
		written := &countedWriter{v.ctx, out, s}
		if err := ociarchive.Export(v.ctx, infoless{provider}, written, ociarchive.WithManifest(manifest, to.ref),
			ociarchive.WithSkipDockerManifest(), ociarchive.WithAllPlatforms()); err != nil {
			return err
		}
		return out.Sync()
	})
	if err != nil {
		return err
	}
	if err := out.Close(); err != nil {
		return err
	}
	return os.Rename(out.Name(), to.path)
}

// beside makes a directory beside a file that is to be written, on the same
// disk, which goes at the end.
func (v *conversion) beside(file string) (string, error) {
	dir, err := os.MkdirTemp(filepath.Dir(file), "."+filepath.Base(file)+".")
	if err == nil {
		v.atEnd(func() error { return os.RemoveAll(dir) })
	}
	return dir, err
}

// infoless has no more to say of a blob than its name where the provider has
// no more: Export asks for the repositories it came from.
type infoless struct{ p content.Provider }

func (i infoless) ReaderAt(ctx context.Context, d ocispec.Descriptor) (content.ReaderAt, error) {
	return i.p.ReaderAt(ctx, d)
}

func (i infoless) Info(ctx context.Context, dgst digest.Digest) (content.Info, error) {
	if p, ok := i.p.(content.InfoProvider); ok {
		return p.Info(ctx, dgst)
	}
	return content.Info{Digest: dgst}, nil
}

// countedWriter tells of what is written, and ends with its context.
type countedWriter struct {
	ctx  context.Context
	w    io.Writer
	step *step
}

func (c *countedWriter) Write(p []byte) (int, error) {
	if err := context.Cause(c.ctx); err != nil {
		return 0, err
	}
	n, err := c.w.Write(p)
	c.step.add(int64(n), 0)
	return n, err
}
