// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
)

// seeds are archives of all kinds.
func seeds(f *testing.F) (all [][]byte) {
	pack := func(headers ...*tar.Header) []byte {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, h := range headers {
			if err := w.WriteHeader(h); err != nil {
				f.Fatal(err)
			}
			if _, err := w.Write(make([]byte, h.Size)); err != nil {
				f.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			f.Fatal(err)
		}
		return b.Bytes()
	}
	for _, h := range hostile() {
		all = append(all, pack(h))
	}
	good := &tar.Header{Name: ".gpuckpt/inventory.img", Typeflag: tar.TypeReg, Size: 700}
	return append(all, pack(good), pack(good, good), pack(&tar.Header{Name: "inventory.img", Typeflag: tar.TypeReg, Size: 5}), nil)
}

func FuzzReadLayer(f *testing.F) {
	for _, s := range seeds(f) {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		seen := make(map[string]bool)
		_ = readLayer(bytes.NewReader(data), func(name string, _ int64, r io.Reader) error {
			if seen[name] || name == "" || strings.ContainsAny(name, "/") || name == "." || name == ".." {
				t.Fatalf("%q got through", name)
			}
			seen[name] = true
			_, err := io.Copy(io.Discard, r)
			return err
		})
	})
}

func FuzzTarFiles(f *testing.F) {
	for _, s := range seeds(f) {
		f.Add(s, "")
		f.Add(s, ".gpuckpt")
	}
	f.Fuzz(func(t *testing.T, data []byte, dir string) {
		files, err := TarFiles(bytes.NewReader(data), int64(len(data)), dir)
		if err != nil {
			return
		}
		for _, file := range files {
			if file.Name != path.Base(file.Name) || file.Name == ".." {
				t.Fatalf("%q got through", file.Name)
			}
			if _, err := io.Copy(io.Discard, io.NewSectionReader(file.Data, 0, int64(file.Bytes))); err != nil {
				t.Fatalf("%q cannot be read: %v", file.Name, err)
			}
		}
		_, _ = images.OpenFiles(files)
	})
}

// oneBlob is a store with a manifest, a config, and one layer for all.
type oneBlob struct{ manifest, config, layer []byte }

func (o oneBlob) ReaderAt(_ context.Context, desc ocispec.Descriptor) (content.ReaderAt, error) {
	for _, b := range [][]byte{o.manifest, o.config, o.layer} {
		if digest.FromBytes(b) == desc.Digest {
			return blob{bytes.NewReader(b)}, nil
		}
	}
	return nil, errdefs.ErrNotFound
}

type blob struct{ *bytes.Reader }

func (blob) Close() error { return nil }

// Manifest, config and layer are given as they are; where the manifest names
// the digest of none it is made to name those.
func FuzzVerify(f *testing.F) {
	dir := f.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "inventory.img"), []byte("x"), 0o600); err != nil {
		f.Fatal(err)
	}
	c, err := images.Open(dir, images.AllowWithoutGPU)
	if err != nil {
		f.Fatal(err)
	}
	l, err := OpenLayout(filepath.Join(f.TempDir(), "layout"))
	if err != nil {
		f.Fatal(err)
	}
	for _, compression := range []Compression{Zstd, Gzip, None} {
		r, err := Build(f.Context(), l, Options{Checkpoint: c, Compression: compression})
		if err != nil {
			f.Fatal(err)
		}
		m, _, err := manifestOf(f.Context(), l, r.Manifest)
		if err != nil {
			f.Fatal(err)
		}
		var parts [][]byte
		for _, d := range []ocispec.Descriptor{r.Manifest, m.Config, m.Layers[0]} {
			data, err := os.ReadFile(blobPath(l, d.Digest))
			if err != nil {
				f.Fatal(err)
			}
			parts = append(parts, data)
		}
		text := strings.ReplaceAll(string(parts[0]), m.Config.Digest.String(), "CONFIG")
		f.Add([]byte(strings.ReplaceAll(text, m.Layers[0].Digest.String(), "LAYER")), parts[1], parts[2])
	}
	f.Fuzz(func(t *testing.T, manifest, config, layer []byte) {
		manifest = bytes.ReplaceAll(manifest, []byte("CONFIG"), []byte(digest.FromBytes(config)))
		manifest = bytes.ReplaceAll(manifest, []byte("LAYER"), []byte(digest.FromBytes(layer)))
		store := oneBlob{manifest, config, layer}
		desc := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest, Digest: digest.FromBytes(manifest), Size: int64(len(manifest))}
		_, verified := Verify(t.Context(), store, desc, nil)
		if _, err := Inspect(t.Context(), store, desc); err != nil && verified == nil {
			t.Fatalf("verified, then not readable: %v", err)
		}
		desc.MediaType = ocispec.MediaTypeImageIndex
		if s, err := OpenStock(t.Context(), store, desc); err == nil {
			s.Close()
		}
	})
}
