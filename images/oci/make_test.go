// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/layout"
)

// newCheckpoint writes a flat checkpoint of one process whose areas have the
// content given, which begins at an offset of each area's file.
func newCheckpoint(t *testing.T, offset uint64, areas ...[]byte) string {
	t.Helper()
	dir := t.TempDir()
	p := images.Process{PID: 1, State: "running", GPUs: []string{uuid}}
	start := uint64(0x7f0000000000)
	for i, content := range areas {
		a := images.Area{File: images.AreaFile(1, i), Start: start + offset, Bytes: uint64(len(content)), Offset: offset}
		start += 1 << 32
		for at := 0; at < len(content); at += images.BlockBytes {
			a.Digests = append(a.Digests, images.DigestBlock(content[at:min(at+images.BlockBytes, len(content))]))
		}
		p.Areas = append(p.Areas, a)
		p.Bytes += a.Bytes
		writeSparse(t, filepath.Join(dir, a.File), offset, content)
	}
	for name, text := range map[string]string{"inventory.img": "inventory", "pages-1.img": strings.Repeat("page", 5000), "descriptors.json": "[]"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	err := images.WriteMetadata(dir, &images.Metadata{
		SchemaVersion: images.SchemaVersion, Created: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
		DriverVersion: "580.159.04", CUDAVersion: "13.0",
		GPUs:      []images.GPU{{UUID: uuid, Name: "NVIDIA H200", Memory: 150 << 30}},
		Processes: []images.Process{p},
	})
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// writeSparse writes what is not zero, and something that means nothing before
// the content and behind it.
func writeSparse(t *testing.T, path string, offset uint64, content []byte) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(bytes.Repeat([]byte{0xaa}, int(offset)), 0); err != nil {
		t.Fatal(err)
	}
	zeros := make([]byte, 1<<20)
	for at := 0; at < len(content); at += len(zeros) {
		part := content[at:min(at+len(zeros), len(content))]
		if bytes.Equal(part, zeros[:len(part)]) {
			continue
		}
		if _, err := f.WriteAt(part, int64(offset)+int64(at)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := f.WriteAt([]byte("behind"), int64(offset)+int64(len(content))); err != nil {
		t.Fatal(err)
	}
}

// random gives bytes that do not compress.
func random(size int) []byte {
	b := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(b)
	return b
}

// testLayout is a layout whose files the tests change.
type testLayout struct {
	*layout.Dir
	dir string
}

func newLayout(t *testing.T) *testLayout {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "layout")
	l, err := layout.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return &testLayout{l, dir}
}

func put(t *testing.T, store content.Store, mediaType string, data []byte) ocispec.Descriptor {
	t.Helper()
	d := ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(data), Size: int64(len(data))}
	if err := content.WriteBlob(t.Context(), store, d.Digest.String(), bytes.NewReader(data), d); err != nil {
		t.Fatal(err)
	}
	return d
}

// blobsDir is where its blobs are.
func (l *testLayout) blobsDir() string { return filepath.Join(l.dir, "blobs", "sha256") }

// plainTar packs files into a layer.
func plainTar(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	names := make([]string, 0, len(files))
	for name := range files {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if err := w.WriteHeader(&tar.Header{Name: name, Size: int64(len(files[name])), Mode: 0o644, Typeflag: tar.TypeReg}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(files[name])); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// newBase puts an image of one layer into a store.
func newBase(t *testing.T, store content.Store) ocispec.Descriptor {
	t.Helper()
	layer := put(t, store, ocispec.MediaTypeImageLayer, plainTar(t, map[string]string{"bin/job": "program"}))
	config, err := json.Marshal(map[string]any{
		"architecture": "amd64", "os": "linux",
		"config":  map[string]any{"Cmd": []string{"/bin/job"}, "Healthcheck": map[string]any{"Test": []string{"NONE"}}},
		"rootfs":  ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{layer.Digest}},
		"history": []ocispec.History{{CreatedBy: "ADD job"}, {CreatedBy: "CMD", EmptyLayer: true}},
	})
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := json.Marshal(ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest,
		Config: put(t, store, ocispec.MediaTypeImageConfig, config), Layers: []ocispec.Descriptor{layer},
	})
	if err != nil {
		t.Fatal(err)
	}
	return put(t, store, ocispec.MediaTypeImageManifest, manifest)
}

func build(t *testing.T, store content.Store, dir string, o Options) *Result {
	t.Helper()
	var err error
	if o.Checkpoint, err = images.Open(dir); err != nil {
		t.Fatal(err)
	}
	r, err := Build(t.Context(), store, o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// unpack gives the layers' directories, the topmost first.
func unpack(t *testing.T, store content.Store, manifest ocispec.Descriptor) []string {
	t.Helper()
	m, _, err := manifestOf(t.Context(), store, manifest)
	if err != nil {
		t.Fatal(err)
	}
	var roots []string
	for _, l := range m.Layers {
		if l.MediaType == MediaTypeGPU {
			continue
		}
		root := t.TempDir()
		roots = append([]string{root}, roots...)
		ra, err := store.ReaderAt(t.Context(), l)
		if err != nil {
			t.Fatal(err)
		}
		r, err := Decompress(content.NewReader(ra), l.MediaType)
		if err != nil {
			t.Fatal(err)
		}
		for tr := tar.NewReader(r); ; {
			h, err := tr.Next()
			if err != nil {
				break
			}
			if h.Typeflag == tar.TypeDir {
				continue
			}
			if err := os.MkdirAll(filepath.Join(root, filepath.Dir(h.Name)), 0o755); err != nil {
				t.Fatal(err)
			}
			f, err := os.Create(filepath.Join(root, h.Name))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.ReadFrom(tr); err != nil {
				t.Fatal(err)
			}
			f.Close()
		}
		r.Close()
		ra.Close()
	}
	return roots
}
