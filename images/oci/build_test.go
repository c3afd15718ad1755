// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/content"
	ggcr "github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
)

const uuid = "GPU-00000000-0000-4000-8000-000000000000"

// The areas of the round trip: full of noise, with gaps of all kinds, all zero,
// and a little behind a layer's end.
func testAreas() [][]byte {
	full := random(3 << 20)
	gaps := make([]byte, 200<<20)
	copy(gaps, random(5000))
	copy(gaps[10<<20:], random(5000))         // a gap that is kept
	copy(gaps[60<<20:], random(9<<20))        // across a layer's and a block's end
	copy(gaps[192<<20-4096:], random(2*4096)) // around another
	copy(gaps[len(gaps)-4096:], random(4096)) // the last page
	return [][]byte{full, gaps, make([]byte, 70<<20)}
}

func TestAnImageHoldsItsCheckpoint(t *testing.T) {
	for _, offset := range []uint64{0, 0x5000, 2<<20 - 4096} {
		for _, c := range []Compression{"", Zstd, Gzip, None} {
			if c != "" && offset != 0x5000 {
				continue
			}
			t.Run(fmt.Sprintf("%s,%#x", c, offset), func(t *testing.T) {
				areas := testAreas()
				dir := newCheckpoint(t, offset, areas...)
				store := newLayout(t)
				var done, total uint64
				r := build(t, store, dir, Options{
					Base: newBase(t, store), BaseName: "example.com/job:1", Compression: c, Threads: 2,
					RWTar:       bytes.NewReader(plainTar(t, map[string]string{"tmp/file": "written"})),
					Annotations: map[string]string{"org.criu.checkpoint.engine.name": "gpuckpt"},
					Progress:    func(s images.Step) { done, total = s.Done, s.Total },
				})
				if done != total || total == 0 {
					t.Errorf("progress ended at %d of %d", done, total)
				}
				if r.Written != r.Bytes || r.Reused != 0 || r.GPULayers == 0 {
					t.Errorf("figures of a first build: %+v", r)
				}
				report, err := Verify(t.Context(), store, r.Manifest, nil)
				if err != nil {
					t.Fatal(err)
				}
				if report.GPUBytes != uint64(len(areas[0])+len(areas[1])+len(areas[2])) {
					t.Errorf("verified %d bytes", report.GPUBytes)
				}
				roots := unpack(t, store, r.Manifest)
				got, err := images.OpenImage(store.blobsDir(), roots...)
				if err != nil {
					t.Fatal(err)
				}
				if err := images.Check(t.Context(), got.Areas(), 0, nil); err != nil {
					t.Error(err)
				}
				for i, a := range got.Areas() {
					content := make([]byte, len(areas[i]))
					if _, err := a.Open(t.Context()).ReadAt(content, int64(offset)); err != nil {
						t.Fatal(err)
					}
					if !bytes.Equal(content, areas[i]) {
						t.Errorf("%s has another content", a.File)
					}
				}
				for _, name := range []string{images.MetadataName, "pages-1.img", "inventory.img"} {
					want, _ := os.ReadFile(filepath.Join(dir, name))
					have, err := os.ReadFile(filepath.Join(got.Dir, name))
					if err != nil || !bytes.Equal(have, want) {
						t.Errorf("%s differs (%v)", name, err)
					}
				}
			})
		}
	}
}

func TestWhatIsZeroTakesNoRoom(t *testing.T) {
	store := newLayout(t)
	r := build(t, store, newCheckpoint(t, 4096, make([]byte, 300<<20)), Options{Compression: None})
	if r.GPULayers != 0 || r.Bytes > 100<<10 {
		t.Errorf("zeros took %d layers, all %d bytes", r.GPULayers, r.Bytes)
	}
	if _, err := Verify(t.Context(), store, r.Manifest, nil); err != nil {
		t.Error(err)
	}
}

// state writes 4 GiB of GPU state of which a 32nd is not zero, spread evenly, so
// that it is cut as real state of that size is.
func spreadState(t *testing.T, fill func(at int64) []byte) string {
	t.Helper()
	const size, stride = 4 << 30, 64 << 20
	dir := newCheckpoint(t, 0, random(4096))
	f, err := os.Create(filepath.Join(dir, "gpu-1-0"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	for at := int64(0); at < size; at += stride {
		if _, err := f.WriteAt(fill(at), at); err != nil {
			t.Fatal(err)
		}
	}
	m, err := images.ReadMetadata(dir)
	if err != nil {
		t.Fatal(err)
	}
	a := &m.Processes[0].Areas[0]
	a.Bytes, a.Digests = size, slices.Repeat(a.Digests, size/images.BlockBytes) // nobody looks at them here
	if err := images.WriteMetadata(dir, m); err != nil {
		t.Fatal(err)
	}
	return dir
}

// One percent of the state changed, in one place: at least 95 % is reused.
func TestAnUnchangedPartIsReused(t *testing.T) {
	store := newLayout(t)
	base := newBase(t, store)
	noise := random(2 << 20)
	same := func(int64) []byte { return noise }
	for _, c := range []Compression{Zstd, None} {
		first := build(t, store, spreadState(t, same), Options{Base: base, Compression: c})
		if first.GPULayers != 64 {
			t.Fatalf("cut into %d layers", first.GPULayers)
		}
		second := build(t, store, spreadState(t, func(at int64) []byte {
			if at != 2<<30 {
				return noise
			}
			changed := bytes.Clone(noise)
			for i := range changed[:len(changed)/2] {
				changed[i]++
			}
			return changed
		}), Options{Base: base, Compression: c, Previous: &first.Manifest})
		all := second.GPUReused + second.GPUWritten
		if second.GPUReused*100 < all*95 || second.GPULayersReused != 63 {
			t.Errorf("%s: %d of %d bytes were reused, %d layers", c, second.GPUReused, all, second.GPULayersReused)
		}
	}
}

// What a previous image has encrypted is for others' keys, and is stored again.
func TestNothingEncryptedIsReused(t *testing.T) {
	store := newLayout(t)
	dir := newCheckpoint(t, 0, random(3<<20))
	first := build(t, store, dir, Options{Compression: Zstd})
	m, _, err := manifestOf(t.Context(), store, first.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	config, _, err := readConfig(t.Context(), store, &m)
	if err != nil {
		t.Fatal(err)
	}
	m.Layers[0].MediaType += "+encrypted"
	previous := rewritten(t, store, m, config)
	if second := build(t, store, dir, Options{Compression: Zstd, Previous: &previous}); second.Manifest.Digest != first.Manifest.Digest {
		t.Errorf("it is another image: %+v", second)
	}
}

func TestTheSameCheckpointGivesTheSameLayers(t *testing.T) {
	dir := newCheckpoint(t, 0x1000, testAreas()...)
	a := build(t, newLayout(t), dir, Options{Threads: 1})
	b := build(t, newLayout(t), dir, Options{Threads: 4})
	if a.Manifest.Digest != b.Manifest.Digest {
		t.Error("two builds of a checkpoint differ")
	}
}

func TestABaseThatIsACheckpointCountsWithoutIts(t *testing.T) {
	store := newLayout(t)
	base := newBase(t, store)
	rw := plainTar(t, map[string]string{"tmp/file": "1"})
	first := build(t, store, newCheckpoint(t, 0, random(3<<20)), Options{Base: base, RWTar: bytes.NewReader(rw)})
	rw2 := put(t, store, ocispec.MediaTypeImageLayer, plainTar(t, map[string]string{"tmp/file": "2"}))
	second := build(t, store, newCheckpoint(t, 0, random(5<<20)), Options{Base: first.Manifest, RW: &rw2})
	image, err := Inspect(t.Context(), store, second.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	var kinds []string
	for _, l := range image.Layers {
		kinds = append(kinds, l.Kind)
	}
	if got := strings.Join(kinds, " "); got != "base rw rw index criu gpu" {
		t.Errorf("the layers are %s", got)
	}
	m, _, err := manifestOf(t.Context(), store, second.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	config, _, err := readConfig(t.Context(), store, &m)
	if err != nil {
		t.Fatal(err)
	}
	var history []ocispec.History
	if err := json.Unmarshal(config["history"], &history); err != nil {
		t.Fatal(err)
	}
	if len(history) != 6 { // of the base two, one of them empty, and one for each layer
		t.Errorf("history %v", history)
	}
	if !strings.Contains(string(config["config"]), "Healthcheck") {
		t.Errorf("the base's config lost a field: %s", config["config"])
	}
	if _, err := Verify(t.Context(), store, second.Manifest, nil); err != nil {
		t.Error(err)
	}
}

// Registries and other tools accept the image.
func TestValidate(t *testing.T) {
	store := newLayout(t)
	dir := newCheckpoint(t, 0x1000, testAreas()...)
	// validate reads layers with gzip only; of others it takes the digests.
	if err := store.Tag(t.Context(), "example.com/job:zstd", build(t, store, dir, Options{Base: newBase(t, store)}).Manifest); err != nil {
		t.Fatal(err)
	}
	index, err := ggcr.ImageIndexFromPath(store.dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(index, validate.Fast); err != nil {
		t.Error(err)
	}
	store = newLayout(t)
	r := build(t, store, dir, Options{Compression: Gzip})
	if err := store.Tag(t.Context(), "example.com/job:1", r.Manifest); err != nil {
		t.Fatal(err)
	}
	if index, err = ggcr.ImageIndexFromPath(store.dir); err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(index); err != nil {
		t.Error(err)
	}
	found, err := store.Get("example.com/job:1")
	if err != nil || found.Digest != r.Manifest.Digest {
		t.Errorf("got %v, %v", found, err)
	}
}

func TestWithoutGPU(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "inventory.img"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := images.Open(dir, images.AllowWithoutGPU)
	if err != nil {
		t.Fatal(err)
	}
	store := newLayout(t)
	r, err := Build(t.Context(), store, Options{Checkpoint: c})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Verify(t.Context(), store, r.Manifest, nil); err != nil {
		t.Error(err)
	}
	got, err := images.OpenImage(store.blobsDir(), unpack(t, store, r.Manifest)...)
	if err != nil || len(got.Metadata.Processes) != 0 {
		t.Errorf("got %v, %v", got, err)
	}
	if got := mediaTypes(t, store, r); !slices.Equal(got, []string{ocispec.MediaTypeImageLayerZstd}) {
		t.Errorf("the layers are of the types %v", got)
	}
}

// With steer = false, or where host memory is short, CRIU's images have the GPU state.
func TestGPUStateInCRIUsImages(t *testing.T) {
	dir := newCheckpoint(t, 0)
	c, err := images.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	c.Metadata.Processes[0].Bytes = 2 << 20
	if err := images.WriteMetadata(dir, c.Metadata); err != nil {
		t.Fatal(err)
	}
	if r := build(t, newLayout(t), dir, Options{}); r.GPUBytes != 2<<20 || r.GPULayers != 0 {
		t.Errorf("got %+v", r)
	}
}

// With GPU state, which takes most of the room, nothing is compressed.
func TestNotCompressed(t *testing.T) {
	store := newLayout(t)
	r := build(t, store, newCheckpoint(t, 0, random(1<<20)), Options{})
	if got := mediaTypes(t, store, r); !slices.Equal(got, []string{ocispec.MediaTypeImageLayer, ocispec.MediaTypeImageLayer, MediaTypeGPU}) {
		t.Errorf("the layers are of the types %v", got)
	}
}

// mediaTypes are those of what is in an image.
func mediaTypes(t *testing.T, store content.Store, r *Result) (all []string) {
	t.Helper()
	image, err := Inspect(t.Context(), store, r.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range image.Layers {
		all = append(all, l.MediaType)
	}
	return all
}

func TestABuildThatFailsLeavesNothing(t *testing.T) {
	dir := newCheckpoint(t, 0, random(130<<20))
	store := newLayout(t)
	base := newBase(t, store)
	before := blobs(t, store)
	c, err := images.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	_, err = Build(ctx, store, Options{Checkpoint: c, Base: base, Threads: 1, Discard: true, Progress: func(s images.Step) {
		if s.Done > 100<<20 { // the first layer is complete
			cancel()
		}
	}})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	// A file that is shorter than it was when it was opened.
	c, err = images.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(dir, "gpu-1-0"), 100<<20); err != nil {
		t.Fatal(err)
	}
	if _, err = Build(t.Context(), store, Options{Checkpoint: c, Base: base, Discard: true}); !errors.Is(err, images.ErrDamaged) || !strings.Contains(err.Error(), "gpu-1-0") {
		t.Fatalf("got %v", err)
	}
	if after := blobs(t, store); !slices.Equal(before, after) {
		t.Errorf("before %v, after %v", before, after)
	}
}

// blobs lists all of a layout's files but its index.
func blobs(t *testing.T, l *testLayout) (names []string) {
	t.Helper()
	err := filepath.WalkDir(l.dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			names = append(names, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}
