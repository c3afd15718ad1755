// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package convert

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/archive"
	"github.com/gpuckpt/gpuckpt/images/layout"
	"github.com/gpuckpt/gpuckpt/images/localstore"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

// Dial connects to containerd, only for a Ref there. Who calls it does not close the client.
type Dial func() (*client.Client, error)

func (d Dial) client() (*client.Client, error) {
	if d == nil {
		return nil, errors.New("a checkpoint in containerd needs a Dial")
	}
	return d()
}

// Source is an open checkpoint, good until Close.
type Source struct {
	Ref
	// Image is the checkpoint image; nil: an image can be built from Checkpoint.
	Image      *ocispec.Descriptor
	Checkpoint *images.Checkpoint
	// Provider reads an image, and the blobs of containerd's own checkpoint.
	Provider content.InfoReaderProvider

	containerd *ContainerdCheckpoint
	archive    *archive.Archive
	name       string // of an image, where it has one
	closers    []io.Closer
}

// Close closes the source and the files of its checkpoint.
func (s *Source) Close() error {
	var errs []error
	for _, closer := range slices.Backward(s.closers) {
		errs = append(errs, closer.Close())
	}
	return errors.Join(errs...)
}

// closer is a function as an io.Closer.
type closer func() error

func (c closer) Close() error { return c() }

// Open opens a checkpoint to read from it.
func Open(ctx context.Context, ref Ref, dial Dial) (_ *Source, err error) {
	s := &Source{Ref: ref}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	switch ref.Kind {
	case InContainerd:
		c, err := dial.client()
		if err != nil {
			return nil, err
		}
		found, err := localstore.Find(ctx, c, ref.Name)
		if err != nil {
			return nil, err
		}
		release, err := localstore.Keep(ctx, c, found.Target.Digest)
		if err != nil {
			return nil, err
		}
		s.closers = append(s.closers, closer(release))
		s.Provider, s.name = localstore.Content(ctx, c), found.Name
		return s, s.named(s.take(ctx, found.Target))
	case InLayout:
		if _, err := os.Stat(ref.Path); err != nil {
			return nil, err // layout.Open would make it
		}
		dir, err := layout.Open(ref.Path)
		return s, s.named(s.get(ctx, dir, err))
	case InOCIArchive:
		file, err := layout.OpenTar(ref.Path)
		return s, s.named(s.get(ctx, file, err))
	case InKubernetes:
		if s.archive, err = archive.Open(ctx, ref.Path); err != nil {
			return nil, err
		}
		s.closers = append(s.closers, s.archive)
		s.Checkpoint = s.archive.Checkpoint
		return s, nil
	}
	s.Checkpoint, err = OpenDump(ref.Path)
	return s, err
}

// named adds the source's name to an error that does not have it.
func (s *Source) named(err error) error {
	if err != nil {
		err = fmt.Errorf("%s: %w", s.Ref, err)
	}
	return err
}

// get takes an image from a layout that was opened, or returns err.
func (s *Source) get(ctx context.Context, from interface {
	content.InfoReaderProvider
	io.Closer
	Get(name string) (ocispec.Descriptor, error)
}, err error) error {
	if err != nil {
		return err
	}
	s.closers = append(s.closers, from)
	found, err := from.Get(s.Name)
	if err != nil {
		return err
	}
	s.Provider, s.name = from, s.Name
	if s.name == "" && localstore.CheckName(layout.NameOf(found)) == nil {
		s.name = layout.NameOf(found)
	}
	return s.take(ctx, found)
}

func (s *Source) take(ctx context.Context, found ocispec.Descriptor) (err error) {
	s.containerd, err = OpenContainerd(ctx, s.Provider, found)
	if errors.Is(err, oci.ErrNotCheckpoint) { // of that form
		s.Image = &ocispec.Descriptor{MediaType: found.MediaType, Digest: found.Digest, Size: found.Size}
		return nil
	}
	if err == nil {
		s.Checkpoint = s.containerd.Checkpoint
		s.closers = append(s.closers, s.containerd)
	}
	return err
}

// OpenDump opens a dump in a directory, with or without GPU state.
func OpenDump(dir string) (*images.Checkpoint, error) {
	c, err := images.Open(dir, images.AllowWithoutGPU)
	if _, serr := os.Stat(filepath.Join(dir, "inventory.img")); err != nil && errors.Is(serr, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s is not a checkpoint: it has no inventory.img", dir)
	}
	return c, err
}
