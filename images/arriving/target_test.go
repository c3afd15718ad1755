// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package arriving

import (
	"archive/tar"
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/images/registry"
)

// No file is made outside of the layer's root, nor by a link.
func TestMakeElsewhere(t *testing.T) {
	dir := t.TempDir()
	other := filepath.Join(dir, images.PieceFile("gpu-1-0", 0))
	if err := os.WriteFile(other, []byte("others'"), 0o600); err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(dir, "root")
	if err := os.Mkdir(root, 0o700); err != nil {
		t.Fatal(err)
	}
	l := &Target{Root: root, LayerBytes: 64 << 20, Layer: oci.Layer{Area: "../../gpu-1-0"}}
	if l.File() != other {
		t.Fatalf("it is not the file that is meant: %s", l.File())
	}
	err := l.Make()
	if there, rerr := os.ReadFile(other); !errors.Is(err, images.ErrDamaged) || rerr != nil || string(there) != "others'" {
		t.Errorf("%v; the file of others has %d bytes, %v", err, len(there), rerr)
	}
}

// What is there of a file is told while it is written, as long as the archive is in its order. An
// archive that writes a part twice takes all back that was told, before it writes.
func TestParts(t *testing.T) {
	const size = 4 * partBytes
	for _, test := range []struct {
		name    string
		offsets []uint64
		want    []uint64
	}{
		{"in order", []uint64{0, size}, []uint64{0, partBytes, 2 * partBytes, 3 * partBytes, size, size + partBytes, size + 2*partBytes, size + 3*partBytes, 2 * size}},
		{"behind a hole", []uint64{size}, []uint64{0, size + 1<<20, size + 1<<20 + partBytes, size + 1<<20 + 2*partBytes, size + 1<<20 + 3*partBytes}},
		{"over each other", []uint64{0, size / 2}, []uint64{0, partBytes, 2 * partBytes, 3 * partBytes, size, 0}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var archive bytes.Buffer
			w := tar.NewWriter(&archive)
			header := func(h tar.Header) {
				t.Helper()
				if err := w.WriteHeader(&h); err != nil {
					t.Fatal(err)
				}
			}
			header(tar.Header{Name: images.ImageDir + "/", Typeflag: tar.TypeDir, Mode: 0o700})
			for n, offset := range test.offsets {
				header(tar.Header{Name: images.ImageDir + "/" + images.PieceFile("gpu-1-0", offset), Typeflag: tar.TypeReg, Size: size, Mode: 0o600})
				if _, err := w.Write(bytes.Repeat([]byte{byte(n + 1)}, size)); err != nil {
					t.Fatal(err)
				}
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			is := digest.FromBytes(archive.Bytes())
			l := &Target{Root: t.TempDir(), LayerBytes: 2 * size, Layer: oci.Layer{Digest: is, DiffID: is, MediaType: ocispec.MediaTypeImageLayer, Area: "gpu-1-0"}}
			if err := l.Make(); err != nil {
				t.Fatal(err)
			}
			var told []uint64
			l.Part = func(n uint64) {
				if len(told) == 0 || n > 0 {
					there, err := os.ReadFile(l.File())
					if err != nil || n > 0 && there[n-1] == 0 {
						t.Errorf("%d bytes are told, and are not there: %v", n, err)
					}
				}
				told = append(told, n)
			}
			f, err := l.open()
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if err := l.fill(f, &archive); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(told, test.want) {
				t.Errorf("told %d, want %d", told, test.want)
			}
		})
	}
}

// An image of more layers than can be stacked gets no snapshot for each: it is left to containerd.
func TestTooManyLayers(t *testing.T) {
	i := &Image{src: new(registry.Source), image: &oci.Image{Layers: make([]oci.Layer, 501)}}
	i.image.Layers[500].Kind = oci.LayerCRIU
	if err := i.plan(); !errors.Is(err, ErrWhole) {
		t.Error(err)
	}
	i.image.Layers = i.image.Layers[1:]
	if err := i.plan(); err != nil {
		t.Error(err)
	}
}
