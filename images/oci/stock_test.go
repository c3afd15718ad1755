// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"testing"

	cimages "github.com/containerd/containerd/v2/core/images"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
)

// packed is a directory as containerd packs it.
func packed(t *testing.T, dir string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.AddFS(os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// What containerd made becomes an image without being unpacked.
func TestStock(t *testing.T) {
	store := newLayout(t)
	base := newBase(t, store)
	rw := put(t, store, ocispec.MediaTypeImageLayer, plainTar(t, map[string]string{"tmp/file": "x"}))
	dir := newCheckpoint(t, 0x2000, testAreas()...)
	archive := put(t, store, cimages.MediaTypeContainerd1Checkpoint, packed(t, dir))
	index, err := json.Marshal(ocispec.Index{MediaType: ocispec.MediaTypeImageIndex, Manifests: []ocispec.Descriptor{base, rw, archive}})
	if err != nil {
		t.Fatal(err)
	}
	s, err := OpenStock(t.Context(), store, put(t, store, ocispec.MediaTypeImageIndex, index))
	if err != nil {
		t.Fatal(err)
	}
	r, err := Build(t.Context(), store, Options{Checkpoint: s.Checkpoint, Base: s.Base, RW: s.RW})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := Verify(t.Context(), store, r.Manifest, nil); err != nil {
		t.Error(err)
	}
	// The same image as from the directory.
	rwTar := build(t, store, dir, Options{Base: base, RW: &rw})
	if rwTar.Manifest.Digest != r.Manifest.Digest {
		t.Error("the image of the archive differs from that of its directory")
	}
	if _, err := OpenStock(t.Context(), store, r.Manifest); !errors.Is(err, ErrNotCheckpoint) {
		t.Errorf("got %v", err)
	}
}

func TestTarFilesRefuses(t *testing.T) {
	for name, h := range map[string]*tar.Header{
		"parent":        {Name: "../inventory.img", Typeflag: tar.TypeReg},
		"back again":    {Name: "a/../inventory.img", Typeflag: tar.TypeReg},
		"absolute":      {Name: "/inventory.img", Typeflag: tar.TypeReg},
		"symbolic link": {Name: "inventory.img", Typeflag: tar.TypeSymlink, Linkname: "/etc/shadow"},
		"hard link":     {Name: "inventory.img", Typeflag: tar.TypeLink, Linkname: "x"},
		"device":        {Name: "inventory.img", Typeflag: tar.TypeBlock},
		"FIFO":          {Name: "inventory.img", Typeflag: tar.TypeFifo},
	} {
		t.Run(name, func(t *testing.T) {
			data := archiveOf(t, h)
			if files, err := TarFiles(bytes.NewReader(data), int64(len(data)), ""); !errors.Is(err, images.ErrDamaged) {
				t.Errorf("got %v, %v", files, err)
			}
		})
	}
	plain := &tar.Header{Name: "inventory.img", Typeflag: tar.TypeReg, Size: 600}
	data := archiveOf(t, plain, plain)
	if _, err := TarFiles(bytes.NewReader(data), int64(len(data)), ""); !errors.Is(err, images.ErrDamaged) {
		t.Errorf("twice: %v", err)
	}
	data = archiveOf(t, plain)[:700]
	if _, err := TarFiles(bytes.NewReader(data), int64(len(data)), ""); !errors.Is(err, images.ErrDamaged) {
		t.Errorf("cut: %v", err)
	}
	inner := archiveOf(t, &tar.Header{Name: "checkpoint/inventory.img", Typeflag: tar.TypeReg}, &tar.Header{Name: "spec.dump", Typeflag: tar.TypeReg})
	files, err := TarFiles(bytes.NewReader(inner), int64(len(inner)), "checkpoint")
	if err != nil || len(files) != 1 || files[0].Name != "inventory.img" {
		t.Errorf("got %v, %v", files, err)
	}
}
