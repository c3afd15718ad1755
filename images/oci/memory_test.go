// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/sign"
)

// memoryOf returns memory that ends with zeros, and has some within.
func memoryOf() []byte {
	memory := make([]byte, 150<<20+4096)
	copy(memory, random(1<<20))
	copy(memory[64<<20-4096:], random(2*4096))
	copy(memory[100<<20:], random(1<<20))
	return memory
}

// sealedCheckpoint returns a checkpoint with memory and a manifest.
func sealedCheckpoint(t *testing.T, memory []byte) *images.Checkpoint {
	t.Helper()
	dir := newCheckpoint(t, 0, random(1<<20))
	if err := os.WriteFile(filepath.Join(dir, "pages-1.img"), memory, 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := images.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if c.Files, _, err = sign.WithManifest(t.Context(), c.Files); err != nil {
		t.Fatal(err)
	}
	return c
}

func first(string) ([]string, error) { return []string{"pages-1.img"}, nil }

func kinds(t *testing.T, store *testLayout, r *Result) (all []string, memory []Layer) {
	t.Helper()
	i, err := Inspect(t.Context(), store, r.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range i.Layers {
		all = append(all, l.Kind)
		if l.Kind == LayerMemory {
			memory = append(memory, l)
		}
	}
	return all, memory
}

// Memory is blobs too, of which a reader makes the file again, also when the image is signed afterwards.
func TestMemoryIsBlobs(t *testing.T) {
	memory := memoryOf()
	store, c := newLayout(t), sealedCheckpoint(t, memory)
	r, err := Build(t.Context(), store, Options{Checkpoint: c, Memory: first})
	if err != nil {
		t.Fatal(err)
	}
	all, blobs := kinds(t, store, r)
	if want := []string{LayerIndex, LayerCRIU, LayerMemory, LayerMemory, LayerMemory, LayerMemory, LayerMemory, LayerGPU}; !slices.Equal(all, want) {
		t.Fatalf("the image has %v, want %v", all, want)
	}
	if r.GPULayers != 1 || r.GPUWritten != 1<<20 {
		t.Errorf("memory counts as GPU state: %+v", r)
	}
	signer, err := sign.ReadOrMakeSigner(filepath.Join(t.TempDir(), "signing.key"))
	if err != nil {
		t.Fatal(err)
	}
	dirs, err := images.ImageDirs(unpack(t, store, r.Manifest)...)
	if err != nil {
		t.Fatal(err)
	}
	found, err := images.ListImage(store.blobsDir(), dirs...)
	if err != nil {
		t.Fatal(err)
	}
	files, err := sign.Add(t.Context(), found.Files, signer.Signature)
	if err != nil {
		t.Fatal(err)
	}
	signed, err := Replace(t.Context(), store, Options{Base: r.Manifest}, files)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range []*Result{r, signed} {
		if report, err := Verify(t.Context(), store, r.Manifest, nil); err != nil || report.GPUBytes != 1<<20 {
			t.Errorf("got %+v, %v", report, err)
		}
		got, err := images.OpenImage(store.blobsDir(), unpack(t, store, r.Manifest)...)
		if err != nil {
			t.Fatal(err)
		}
		at := slices.IndexFunc(got.Files, func(f images.File) bool { return f.Name == "pages-1.img" })
		if at < 0 || got.Files[at].Bytes != uint64(len(memory)) {
			t.Fatalf("the memory is not there, or not all of it: %+v", got.Files)
		}
		f, err := got.Files[at].Reader(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if content, err := io.ReadAll(io.NewSectionReader(f, 0, int64(len(memory)))); err != nil || !bytes.Equal(content, memory) {
			t.Errorf("it has another content: %v", err)
		}
	}
	last := blobs[len(blobs)-1]
	if last.Offset+last.Bytes != uint64(len(memory)) {
		t.Errorf("the last piece ends at %d", last.Offset+last.Bytes)
	}
	for _, b := range blobs {
		damage(t, blobPath(store.dir, b.Digest), func() { refuses(t, store, r.Manifest, images.ErrDamaged, "pages-1.img") })
	}
}

// damage changes a byte of a file for as long as do takes.
func damage(t *testing.T, path string, do func()) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err == nil {
		data[0] ^= 1
		err = os.WriteFile(path, data, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	do()
	data[0] ^= 1
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// The end of memory may not be left out: a reader takes its size from there.
func TestVerifyWantsTheEndOfMemory(t *testing.T) {
	store := newLayout(t)
	r, err := Build(t.Context(), store, Options{Checkpoint: sealedCheckpoint(t, memoryOf()), Memory: first})
	if err != nil {
		t.Fatal(err)
	}
	m, _, err := manifestOf(t.Context(), store, r.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	config, _, err := readConfig(t.Context(), store, &m)
	if err != nil {
		t.Fatal(err)
	}
	at := slices.IndexFunc(m.Layers, func(l ocispec.Descriptor) bool { return l.Annotations[annotations.Layer] == LayerGPU })
	m.Layers = slices.Delete(m.Layers, at-1, at)
	refuses(t, store, rewritten(t, store, m, config), images.ErrDamaged, "no blob has the end of pages-1.img")
}

// What no manifest has digests of stays a file of a layer, and so does all memory where blobs are not asked for.
func TestMemoryInALayer(t *testing.T) {
	store, c := newLayout(t), sealedCheckpoint(t, memoryOf())
	for name, o := range map[string]Options{
		"no manifest": {Memory: first, Checkpoint: &images.Checkpoint{Dir: c.Dir, Metadata: c.Metadata, Files: slices.DeleteFunc(slices.Clone(c.Files), func(f images.File) bool { return sign.IsSeal(f.Name) })}},
		"zstd":        {Checkpoint: c, Compression: Zstd, Memory: first},
		"another":     {Checkpoint: c, Memory: func(string) ([]string, error) { return []string{"pages-2.img"}, nil }},
		"damage":      {Checkpoint: c, Memory: func(string) ([]string, error) { return nil, images.ErrDamaged }},
	} {
		r, err := Build(t.Context(), store, o)
		if err != nil {
			t.Fatal(err)
		}
		if all, _ := kinds(t, store, r); slices.Contains(all, LayerMemory) {
			t.Errorf("%s: the image has %v", name, all)
		}
		if _, err := Verify(t.Context(), store, r.Manifest, nil); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
