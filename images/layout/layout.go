// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package layout reads and writes OCI image layouts in directories, and reads tar archives.
//
// A layout is a content store and an index of the images in it, index.json. An image's blobs come
// first. Tag then puts it into the index. A layout has no garbage collector.
package layout

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/errdefs"
	"github.com/moby/sys/atomicwriter"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Dir is a layout in a directory. Only one goroutine may Tag at a time.
type Dir struct {
	content.Store
	dir string
}

// Open opens a layout, or makes one where there is no directory or an empty one.
func Open(dir string) (_ *Dir, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("open OCI layout: %w", err)
		}
	}()
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	l := &Dir{dir: dir}
	marker := filepath.Join(dir, ocispec.ImageLayoutFile)
	if len(entries) == 0 {
		if err := os.MkdirAll(filepath.Join(dir, ocispec.ImageBlobsDir), 0o755); err != nil {
			return nil, err
		}
		if err := l.writeIndex(&ocispec.Index{}); err != nil {
			return nil, err
		}
		if err := writeJSON(marker, ocispec.ImageLayout{Version: ocispec.ImageLayoutVersion}); err != nil {
			return nil, err
		}
	} else {
		data, err := os.ReadFile(marker)
		if err != nil {
			return nil, fmt.Errorf("%s is neither empty nor a layout: %w", dir, err)
		}
		var found ocispec.ImageLayout
		if err := json.Unmarshal(data, &found); err != nil || found.Version != ocispec.ImageLayoutVersion {
			return nil, fmt.Errorf("%s is of the version %q, not %q", dir, found.Version, ocispec.ImageLayoutVersion)
		}
		if _, err := l.readIndex(); err != nil {
			return nil, err
		}
	}
	l.Store, err = local.NewStore(dir)
	return l, err
}

// Close removes the directory that unfinished writes were in.
func (l *Dir) Close() error {
	if err := os.Remove(filepath.Join(l.dir, "ingest")); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Tag puts an image into the index under a name, which another image of that name loses.
func (l *Dir) Tag(ctx context.Context, name string, manifest ocispec.Descriptor) error {
	index, err := l.readIndex()
	if err == nil {
		_, err = l.Info(ctx, manifest.Digest)
	}
	if err == nil {
		manifest.Annotations = map[string]string{cimages.AnnotationImageName: name, ocispec.AnnotationRefName: name}
		index.Manifests = append(slices.DeleteFunc(index.Manifests, func(d ocispec.Descriptor) bool { return NameOf(d) == name }), manifest)
		err = l.writeIndex(index)
	}
	if err != nil {
		return fmt.Errorf("name the image %s: %w", name, err)
	}
	return nil
}

// Get finds an image by its name; an empty name stands for the only image.
func (l *Dir) Get(name string) (none ocispec.Descriptor, _ error) {
	index, err := l.readIndex()
	if err != nil {
		return none, err
	}
	return find(index, name)
}

func find(index *ocispec.Index, name string) (ocispec.Descriptor, error) {
	var names []string
	for _, d := range index.Manifests {
		if name == "" && len(index.Manifests) == 1 || name != "" && (name == NameOf(d) || name == d.Annotations[ocispec.AnnotationRefName]) {
			return d, nil
		}
		names = append(names, NameOf(d))
	}
	return ocispec.Descriptor{}, fmt.Errorf("no image %q; name one of its images after an @: it has %q: %w", name, names, errdefs.ErrNotFound)
}

// NameOf returns an image's name in an index: containerd's, which is full, or else the standard's.
func NameOf(d ocispec.Descriptor) string {
	if name, ok := d.Annotations[cimages.AnnotationImageName]; ok {
		return name
	}
	return d.Annotations[ocispec.AnnotationRefName]
}

func (l *Dir) readIndex() (*ocispec.Index, error) {
	data, err := os.ReadFile(filepath.Join(l.dir, ocispec.ImageIndexFile))
	if err != nil {
		return nil, err
	}
	return parseIndex(data)
}

func parseIndex(data []byte) (*ocispec.Index, error) {
	index := new(ocispec.Index)
	if err := json.Unmarshal(data, index); err != nil {
		return nil, fmt.Errorf("%s: %w", ocispec.ImageIndexFile, err)
	}
	return index, nil
}

func (l *Dir) writeIndex(index *ocispec.Index) error {
	index.Versioned = specs.Versioned{SchemaVersion: 2}
	index.MediaType = ocispec.MediaTypeImageIndex
	if index.Manifests == nil {
		index.Manifests = []ocispec.Descriptor{}
	}
	return writeJSON(filepath.Join(l.dir, ocispec.ImageIndexFile), index)
}

// writeJSON makes a file hold a value, by rename.
func writeJSON(path string, value any) error {
	data, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return atomicwriter.WriteFile(path, data, 0o644)
}
