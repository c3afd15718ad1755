// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/archive"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

// The kinds of places where checkpoints are, as they are written before a
// colon.
const (
	inContainerd = "containerd"
	inLayout     = "oci"
	inOCIArchive = "oci-archive"
	inKubernetes = "kubernetes-archive"
	inDir        = "dir"
)

// places explains them in the help of commands.
const places = `A PLACE is
  containerd:REF                an image in containerd; a bare REF is one too
  oci:DIR[@REF]                 an OCI layout; @REF names one of several images
  oci-archive:FILE[@REF]        an OCI layout in a tar archive
  kubernetes-archive:FILE       what the kubelet keeps in /var/lib/kubelet/checkpoints
  dir:DIR                       a dump
A bare path (/… or ./…) is looked at to see which it is.`

// place is where a checkpoint is, or goes.
type place struct {
	kind string
	path string // of a file or directory
	ref  string // of the image, where the kind has names
}

func (p place) String() string {
	switch {
	case p.kind == inContainerd:
		return p.ref
	case p.ref != "":
		return p.path + "@" + p.ref
	}
	return p.path
}

// parsePlace reads a place; a bare path must exist.
func parsePlace(s string) (place, error) {
	if kind, rest, ok := strings.Cut(s, ":"); ok {
		switch kind {
		case inContainerd:
			return place{kind: kind, ref: rest}, fullName(rest)
		case inLayout, inOCIArchive:
			path, ref, _ := strings.Cut(rest, "@")
			return place{kind: kind, path: path, ref: ref}, nil
		case inKubernetes, inDir:
			return place{kind: kind, path: rest}, nil
		}
	}
	if !isPath(s) {
		return place{kind: inContainerd, ref: s}, fullName(s)
	}
	path, ref, _ := strings.Cut(s, "@")
	kind, err := kindOf(path)
	if err == nil && ref != "" && (kind == inKubernetes || kind == inDir) {
		err = fmt.Errorf("%s has no images with names", path)
	}
	return place{kind: kind, path: path, ref: ref}, err
}

// kindOf looks at a file or directory.
func kindOf(path string) (string, error) {
	st, err := os.Stat(path)
	if err != nil {
		return "", err
	}
	if st.IsDir() {
		if _, err := os.Stat(filepath.Join(path, ocispec.ImageLayoutFile)); err == nil {
			return inLayout, nil
		}
		return inDir, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	// Either has something of its own among its first files.
	for t := tar.NewReader(f); ; {
		h, err := t.Next()
		if err == io.EOF {
			return "", fmt.Errorf("%s is neither an OCI archive nor one of the kubelet's", path)
		}
		if err != nil {
			// Compressed, perhaps; opening it as the kubelet's says so.
			return inKubernetes, nil
		}
		switch name := strings.TrimPrefix(h.Name, "./"); {
		case name == ocispec.ImageLayoutFile, name == ocispec.ImageIndexFile, strings.HasPrefix(name, ocispec.ImageBlobsDir+"/"):
			return inOCIArchive, nil
		case name == archive.ConfigName, name == archive.SpecName, strings.HasPrefix(name, "checkpoint/"):
			return inKubernetes, nil
		}
	}
}

// source is an open place. One of Image, Stock, Archive and Dir is set.
type source struct {
	place
	// provider reads image and stock.
	provider content.Provider
	image    *ocispec.Descriptor // an OCI image
	stock    *oci.Stock
	index    ocispec.Descriptor // of stock
	archive  *archive.Archive
	dir      *images.Checkpoint
	name     string // of an image, where it has one

	closers []io.Closer
}

func (s *source) Close() error {
	var errs []error
	for i := len(s.closers) - 1; i >= 0; i-- {
		errs = append(errs, s.closers[i].Close())
	}
	return errors.Join(errs...)
}

// flat is the checkpoint of a source that is no OCI image.
func (s *source) flat() *images.Checkpoint {
	switch {
	case s.stock != nil:
		return s.stock.Checkpoint
	case s.archive != nil:
		return s.archive.Checkpoint
	}
	return s.dir
}

// open opens a place to read from it. connected is asked for containerd when it is
// needed.
func (p place) open(ctx context.Context, connected func() (*client.Client, error), d *daemon) (_ *source, err error) {
	s := &source{place: p}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%s: %w", p, err), s.Close())
		}
	}()
	switch p.kind {
	case inContainerd:
		c, err := connected()
		if err != nil {
			return nil, err
		}
		found, err := d.image(ctx, c, p.ref)
		if err != nil {
			return nil, err
		}
		s.provider, s.name = c.ContentStore(), found.Name
		return s, s.take(ctx, found.Target)
	case inLayout:
		if _, err := os.Stat(p.path); err != nil {
			return nil, err // it would be made
		}
		layout, err := oci.OpenLayout(p.path)
		if err != nil {
			return nil, err
		}
		s.closers = append(s.closers, layout)
		found, err := layout.Get(ctx, p.ref)
		if err != nil {
			return nil, err
		}
		s.provider, s.name = layout, nameOf(found, p.ref)
		return s, s.take(ctx, found)
	case inOCIArchive:
		blobs, err := openBlobs(p.path)
		if err != nil {
			return nil, err
		}
		s.closers = append(s.closers, blobs)
		found, err := blobs.get(p.ref)
		if err != nil {
			return nil, err
		}
		s.provider, s.name = blobs, nameOf(found, p.ref)
		return s, s.take(ctx, found)
	case inKubernetes:
		if s.archive, err = archive.Open(p.path); err != nil {
			return nil, err
		}
		s.closers = append(s.closers, s.archive)
		return s, nil
	}
	s.dir, err = openDir(p.path)
	return s, err
}

// take looks at what kind of image was found.
func (s *source) take(ctx context.Context, found ocispec.Descriptor) error {
	stock, err := oci.OpenStock(ctx, s.provider, found)
	switch {
	case err == nil:
		s.stock, s.index = stock, found
		s.closers = append(s.closers, stock)
	case errors.Is(err, oci.ErrNotCheckpoint): // as containerd makes them
		s.image = &found
	default:
		return err
	}
	return nil
}

// nameAnnotations are where layouts and archives have an image's name.
var nameAnnotations = [...]string{cimages.AnnotationImageName, ocispec.AnnotationRefName}

func nameOf(d ocispec.Descriptor, asked string) string {
	if asked != "" {
		return asked
	}
	for _, a := range nameAnnotations {
		if name := d.Annotations[a]; fullName(name) == nil {
			return name
		}
	}
	return ""
}

// blobs is an OCI layout in a tar archive, read in place.
type blobs struct {
	file  *os.File
	index ocispec.Index
	files map[digest.Digest]images.File
}

// maxIndex bounds an archive's index.json.
const maxIndex = 8 << 20

func openBlobs(path string) (_ *blobs, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	b := &blobs{file: f, files: make(map[digest.Digest]images.File)}
	top, err := oci.TarFiles(f, st.Size(), "")
	if err != nil {
		return nil, err
	}
	var index *images.File
	for i := range top {
		if top[i].Name == ocispec.ImageIndexFile {
			index = &top[i]
		}
	}
	if index == nil || index.Bytes > maxIndex {
		return nil, fmt.Errorf("it has no %s: it is no OCI archive", ocispec.ImageIndexFile)
	}
	data := make([]byte, index.Bytes)
	if _, err := index.Data.ReadAt(data, 0); err != nil && err != io.EOF {
		return nil, err
	}
	if err := json.Unmarshal(data, &b.index); err != nil {
		return nil, fmt.Errorf("%s: %w", ocispec.ImageIndexFile, err)
	}
	list, err := oci.TarFiles(f, st.Size(), ocispec.ImageBlobsDir+"/"+digest.SHA256.String())
	if err != nil {
		return nil, err
	}
	for _, file := range list {
		b.files[digest.NewDigestFromEncoded(digest.SHA256, file.Name)] = file
	}
	return b, nil
}

func (b *blobs) Close() error { return b.file.Close() }

// get finds an image by its name, or the only one.
func (b *blobs) get(name string) (ocispec.Descriptor, error) {
	if name == "" && len(b.index.Manifests) == 1 {
		return b.index.Manifests[0], nil
	}
	var names []string
	for _, d := range b.index.Manifests {
		for _, a := range nameAnnotations {
			if n := d.Annotations[a]; n != "" {
				if n == name {
					return d, nil
				}
				names = append(names, n)
				break
			}
		}
	}
	return ocispec.Descriptor{}, fmt.Errorf("name one of its images after an @: it has %q: %w", names, errdefs.ErrNotFound)
}

// ReaderAt reads a blob.
func (b *blobs) ReaderAt(_ context.Context, d ocispec.Descriptor) (content.ReaderAt, error) {
	f, ok := b.files[d.Digest]
	if !ok {
		return nil, fmt.Errorf("the archive has no %s: %w", d.Digest, errdefs.ErrNotFound)
	}
	return blob{f}, nil
}

type blob struct{ images.File }

func (b blob) ReadAt(p []byte, at int64) (int, error) { return b.Data.ReadAt(p, at) }
func (b blob) Size() int64                            { return int64(b.Bytes) }
func (b blob) Close() error                           { return nil }
