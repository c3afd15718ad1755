// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Layout is a directory of OCI images ("OCI image layout"): a content store,
// and an index of what is in it.
type Layout struct {
	content.Store
	dir string
	mu  sync.Mutex // one change of the index at a time
}

// OpenLayout opens a layout, or makes one where there is no directory or an
// empty one.
func OpenLayout(dir string) (*Layout, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("open OCI layout: %w", err)
	}
	l := &Layout{dir: dir}
	marker := filepath.Join(dir, ocispec.ImageLayoutFile)
	if len(entries) == 0 {
		if err := os.MkdirAll(filepath.Join(dir, "blobs"), 0o755); err != nil {
			return nil, fmt.Errorf("make OCI layout: %w", err)
		}
		if err := l.writeIndex(&ocispec.Index{}); err != nil {
			return nil, fmt.Errorf("make OCI layout: %w", err)
		}
		if err := writeFile(marker, ocispec.ImageLayout{Version: ocispec.ImageLayoutVersion}); err != nil {
			return nil, fmt.Errorf("make OCI layout: %w", err)
		}
	} else {
		data, err := os.ReadFile(marker)
		if err != nil {
			return nil, fmt.Errorf("open OCI layout: %s is not empty and not a layout: %w", dir, err)
		}
		var found ocispec.ImageLayout
		if err := json.Unmarshal(data, &found); err != nil || found.Version != ocispec.ImageLayoutVersion {
			return nil, fmt.Errorf("open OCI layout: %s is of the version %q, not %q", dir, found.Version, ocispec.ImageLayoutVersion)
		}
		if _, err := l.readIndex(); err != nil {
			return nil, fmt.Errorf("open OCI layout: %w", err)
		}
	}
	if l.Store, err = local.NewStore(dir); err != nil {
		return nil, fmt.Errorf("open OCI layout: %w", err)
	}
	return l, nil
}

// Close removes the directory that unfinished writes were in.
func (l *Layout) Close() error {
	err := os.Remove(filepath.Join(l.dir, "ingest"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Tag puts an image into the index under a name, by rename; an image that had
// the name has it no more. Names are those of containerd, "example.com/job:1".
func (l *Layout) Tag(ctx context.Context, name string, manifest ocispec.Descriptor) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, err := l.Info(ctx, manifest.Digest); err != nil {
		return fmt.Errorf("name the image %s: %w", name, err)
	}
	index, err := l.readIndex()
	if err != nil {
		return fmt.Errorf("name the image %s: %w", name, err)
	}
	kept := index.Manifests[:0]
	for _, d := range index.Manifests {
		if nameOf(d) != name {
			kept = append(kept, d)
		}
	}
	manifest.Annotations = map[string]string{cimages.AnnotationImageName: name, ocispec.AnnotationRefName: name}
	index.Manifests = append(kept, manifest)
	if err := l.writeIndex(index); err != nil {
		return fmt.Errorf("name the image %s: %w", name, err)
	}
	return nil
}

// Get finds an image by its name, or the only one for an empty name.
func (l *Layout) Get(_ context.Context, name string) (ocispec.Descriptor, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	index, err := l.readIndex()
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	for _, d := range index.Manifests {
		if nameOf(d) == name || name == "" && len(index.Manifests) == 1 {
			return d, nil
		}
	}
	return ocispec.Descriptor{}, fmt.Errorf("no image %q among the %d in %s: %w", name, len(index.Manifests), l.dir, errdefs.ErrNotFound)
}

// nameOf gives an image's name: containerd's annotation, which holds all of it,
// else the specification's.
func nameOf(d ocispec.Descriptor) string {
	if name, ok := d.Annotations[cimages.AnnotationImageName]; ok {
		return name
	}
	return d.Annotations[ocispec.AnnotationRefName]
}

func (l *Layout) readIndex() (*ocispec.Index, error) {
	path := filepath.Join(l.dir, ocispec.ImageIndexFile)
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	index := new(ocispec.Index)
	if err := json.Unmarshal(data, index); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return index, nil
}

func (l *Layout) writeIndex(index *ocispec.Index) error {
	index.Versioned = specs.Versioned{SchemaVersion: 2}
	index.MediaType = ocispec.MediaTypeImageIndex
	if index.Manifests == nil {
		index.Manifests = []ocispec.Descriptor{}
	}
	return writeFile(filepath.Join(l.dir, ocispec.ImageIndexFile), index)
}

// writeFile makes a file hold a value as JSON, by rename.
func writeFile(path string, value any) (err error) {
	data, err := json.Marshal(value)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
		}
	}()
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
