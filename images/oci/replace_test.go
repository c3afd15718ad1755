// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bytes"
	"errors"
	"path/filepath"
	"slices"
	"testing"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/sign"
)

// An image that is signed afterwards keeps its layers of GPU state. A file that is not what
// was signed is found in it, and so is one too many.
func TestReplace(t *testing.T) {
	store := newLayout(t)
	signer, err := sign.ReadOrMakeSigner(filepath.Join(t.TempDir(), "signing.key"))
	if err != nil {
		t.Fatal(err)
	}
	checkpoint, err := images.Open(newCheckpoint(t, 4096, random(3<<20)))
	if err != nil {
		t.Fatal(err)
	}
	built, err := Build(t.Context(), store, Options{Checkpoint: checkpoint})
	if err != nil {
		t.Fatal(err)
	}
	if r, err := Verify(t.Context(), store, built.Manifest, nil); err != nil || r.Seal != nil {
		t.Fatalf("an image that is not signed: %+v, %v", r, err)
	}
	files, err := sign.Add(t.Context(), checkpoint.Files, signer.Signature)
	if err != nil {
		t.Fatal(err)
	}
	signed, err := Replace(t.Context(), store, Options{Base: built.Manifest}, files)
	if err != nil {
		t.Fatal(err)
	}
	if signed.GPUBytes == 0 || signed.GPUBytes != built.GPUBytes || signed.GPUReused == 0 || signed.GPUWritten != 0 || signed.Written == 0 || signed.Manifest.Digest == built.Manifest.Digest {
		t.Errorf("got %+v", signed)
	}
	r, err := Verify(t.Context(), store, signed.Manifest, nil)
	if err != nil || r.Seal == nil {
		t.Fatalf("got %+v, %v", r, err)
	}
	if _, err := r.Seal.SignedBy([]sign.Key{signer.Key}); err != nil {
		t.Error(err)
	}
	if before, err := Inspect(t.Context(), store, built.Manifest); err != nil {
		t.Error(err)
	} else if after, err := Inspect(t.Context(), store, signed.Manifest); err != nil || len(after.Layers) != len(before.Layers) || after.Layers[0] != before.Layers[0] || after.Layers[2] != before.Layers[2] {
		t.Errorf("got %+v, %v", after, err)
	}
	if got := mediaTypes(t, store, signed); !slices.Equal(got, mediaTypes(t, store, built)) {
		t.Errorf("the layers are of the types %v", got)
	}
	for name, change := range map[string]func([]images.File) []images.File{
		"a byte": func(files []images.File) []images.File {
			at := slices.IndexFunc(files, func(f images.File) bool { return f.Name == "inventory.img" })
			files[at].Data = bytes.NewReader([]byte("Inventory"))
			return files
		},
		"a file more": func(files []images.File) []images.File {
			return append(files, images.File{Name: "more.img", Data: bytes.NewReader(nil)})
		},
		"a file less": func(files []images.File) []images.File {
			return slices.DeleteFunc(files, func(f images.File) bool { return f.Name == "inventory.img" })
		},
	} {
		forged, err := Replace(t.Context(), store, Options{Base: signed.Manifest}, change(slices.Clone(files)))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Verify(t.Context(), store, forged.Manifest, nil); !errors.Is(err, sign.ErrChanged) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	if _, err := Replace(t.Context(), store, Options{Base: signed.Manifest, Compression: "x"}, files); err == nil {
		t.Error("an unknown compression is taken")
	}
}
