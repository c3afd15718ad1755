// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package convert

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"

	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	ociarchive "github.com/containerd/containerd/v2/core/images/archive"
	"github.com/containerd/containerd/v2/pkg/atomicfile"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"

	"github.com/gpuckpt/gpuckpt/images/layout"
	"github.com/gpuckpt/gpuckpt/images/localstore"
)

var errNoName = errors.New("the image needs a name: write it after the path, PATH@example.com/job:1")

func (v *conversion) intoContainerd(ctx context.Context) error {
	c, err := v.Dial.client()
	if err != nil {
		return err
	}
	var same digest.Digest // that a copy has, too
	if v.src.Image != nil && v.Sign == nil {
		same = v.src.Image.Digest
	}
	if err := localstore.CheckFree(ctx, c, v.to.Name, same); err != nil {
		return err
	}
	return v.intoStore(ctx, c.ContentStore(), true, func(m ocispec.Descriptor) error { return localstore.Tag(ctx, c, v.to.Name, m) })
}

func (v *conversion) intoLayout(ctx context.Context) (err error) {
	if v.to.Name == "" {
		return errNoName
	}
	_, before := os.Stat(v.to.Path)
	dir, err := layout.Open(v.to.Path)
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, dir.Close())
		if err != nil && errors.Is(before, os.ErrNotExist) {
			err = errors.Join(err, os.RemoveAll(v.to.Path))
		}
	}()
	return v.intoStore(ctx, dir, false, func(m ocispec.Descriptor) error { return dir.Tag(ctx, v.to.Name, m) })
}

// intoArchive writes an OCI archive, of what is no image by way of a layout beside it.
func (v *conversion) intoArchive(ctx context.Context) (err error) {
	if v.to.Name == "" {
		return errNoName
	}
	provider, manifest := v.src.Provider, v.src.Image
	if manifest != nil && v.Sign == nil {
		v.result.Digest = manifest.Digest.String()
	} else {
		beside, err := v.beside()
		if err != nil {
			return err
		}
		dir, err := layout.Open(beside)
		if err != nil {
			return err
		}
		v.atEnd(dir.Close)
		built, err := v.build(ctx, dir, false)
		if err != nil {
			return err
		}
		provider, manifest = dir, &built
	}
	out, err := atomicfile.New(v.to.Path, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = out.Cancel() }() // nothing once it is closed
	meter := v.Progress.Begin("archive", 0)
	if err := ociarchive.Export(ctx, provider, meter.Writer(ctx, out), ociarchive.WithManifest(*manifest, v.to.Name),
		ociarchive.WithSkipDockerManifest(), ociarchive.WithAllPlatforms()); err != nil {
		return err
	}
	if err := out.Close(); err != nil {
		return err
	}
	meter.End("written")
	return nil
}

// beside makes a directory beside the file that is to be written, until the end.
func (v *conversion) beside() (string, error) {
	dir, err := os.MkdirTemp(filepath.Dir(v.to.Path), "."+filepath.Base(v.to.Path)+".")
	if err == nil {
		v.atEnd(func() error { return os.RemoveAll(dir) })
	}
	return dir, err
}

const copiesAtOnce = 4

// copyImage copies the image's blobs, several at a time. containerd's lease keeps what is there of
// an image without a name; its garbage collector follows labels on the blobs. A layout has neither.
func (v *conversion) copyImage(ctx context.Context, to content.Store, collected bool) error {
	from := v.src.Provider
	children := cimages.FilterPlatforms(cimages.ChildrenHandler(from), platforms.All)
	if collected {
		children = cimages.SetChildrenMappedLabels(to, children, nil)
	}
	meter := v.Progress.Begin("copy", 0)
	write := cimages.HandlerFunc(func(ctx context.Context, d ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		data, err := from.ReaderAt(ctx, d)
		if err != nil {
			return nil, err
		}
		defer data.Close()
		err = content.WriteBlob(ctx, to, "gpuckpt-copy-"+d.Digest.String(), meter.Reader(ctx, io.NewSectionReader(data, 0, data.Size())), d)
		if errdefs.IsAlreadyExists(err) {
			err = nil
		}
		return nil, err
	})
	if err := cimages.Dispatch(ctx, cimages.Handlers(write, children), semaphore.NewWeighted(copiesAtOnce), *v.src.Image); err != nil {
		return err
	}
	meter.End("copied")
	return nil
}
