// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package convert

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/layout"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

// packed packs files as containerd does.
func packed(t testing.TB, files map[string]string) []byte {
	t.Helper()
	dir := t.TempDir()
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := errors.Join(w.AddFS(os.DirFS(dir)), w.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func put(t *testing.T, store content.Store, mediaType string, data []byte) ocispec.Descriptor {
	t.Helper()
	d := ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(data), Size: int64(len(data))}
	if err := content.WriteBlob(t.Context(), store, "put", bytes.NewReader(data), d); err != nil {
		t.Fatal(err)
	}
	return d
}

func dump(t *testing.T) *images.Checkpoint {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "inventory.img"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := OpenDump(dir)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// What containerd made becomes an image, an archive of it, and a Kubernetes archive, and
// is the same everywhere.
func TestContainerdCheckpointBecomesAnImage(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "layout")
	store, err := layout.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	rw := put(t, store, ocispec.MediaTypeImageLayer, packed(t, map[string]string{"file": "x"}))
	base, err := oci.Build(t.Context(), store, oci.Options{Checkpoint: dump(t), RW: &rw})
	if err != nil {
		t.Fatal(err)
	}
	criu := put(t, store, cimages.MediaTypeContainerd1Checkpoint, packed(t, map[string]string{"inventory.img": "x", "pages-1.img": "pages"}))
	index, err := json.Marshal(ocispec.Index{MediaType: ocispec.MediaTypeImageIndex, Manifests: []ocispec.Descriptor{base.Manifest, rw, criu}})
	if err != nil {
		t.Fatal(err)
	}
	stock := put(t, store, ocispec.MediaTypeImageIndex, index)
	if err := store.Tag(t.Context(), "example.com/job:1", stock); err != nil {
		t.Fatal(err)
	}
	// Its base image is a checkpoint, but another one.
	if _, err := oci.Inspect(t.Context(), store, stock); !errors.Is(err, oci.ErrNotCheckpoint) || !strings.Contains(err.Error(), "gpuckpt image convert") {
		t.Errorf("a checkpoint of containerd's as an image of ours: %v", err)
	}
	file := filepath.Join(t.TempDir(), "job.tar")
	to := Ref{Kind: InOCIArchive, Path: file}
	made, err := Convert(t.Context(), Ref{Kind: InLayout, Path: dir}, to, Options{MustBuild: true})
	if err != nil || !made.Built || made.Destination != file+"@example.com/job:1" {
		t.Fatalf("got %+v, %v", made, err)
	}
	src, err := Open(t.Context(), to, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	if _, err := oci.Verify(t.Context(), src.Provider, *src.Image, nil); err != nil {
		t.Error(err)
	}
	if found, err := oci.Inspect(t.Context(), src.Provider, *src.Image); err != nil || found.Digest.String() != made.Digest || len(found.Layers) != 3 {
		t.Errorf("got %+v, %v", found, err)
	}
	if _, err := OpenContainerd(t.Context(), src.Provider, *src.Image); !errors.Is(err, oci.ErrNotCheckpoint) {
		t.Errorf("an image as a checkpoint of containerd's: %v", err)
	}
	if _, err := Convert(t.Context(), to, Ref{Kind: InLayout, Path: filepath.Join(t.TempDir(), "new")}, Options{MustBuild: true}); err == nil || !strings.Contains(err.Error(), "already") {
		t.Errorf("an image was built of an image: %v", err)
	}
	kube := Ref{Kind: InKubernetes, Path: filepath.Join(t.TempDir(), "kube.tar")}
	if _, err := Convert(t.Context(), to, kube, Options{}); err != nil {
		t.Fatal(err)
	}
	back := Ref{Kind: InLayout, Path: filepath.Join(t.TempDir(), "back"), Name: "example.com/job:2"}
	if made, err = Convert(t.Context(), kube, back, Options{Base: "oci:" + dir}); err == nil || !strings.Contains(err.Error(), "not an OCI image") {
		t.Fatalf("with a checkpoint of containerd's as the base: %+v, %v", made, err)
	}
	if _, err := os.Stat(back.Path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a conversion that failed left its layout: %v", err)
	}
	if made, err = Convert(t.Context(), kube, back, Options{Base: "oci-archive:" + file}); err != nil || !made.Built {
		t.Errorf("got %+v, %v", made, err)
	}
}

// The blobs of an image are files of a Kubernetes archive, whose image has them as blobs again.
func TestBlobsBecomeFiles(t *testing.T) {
	dir := t.TempDir()
	from := filepath.Join(dir, "dump")
	data := bytes.Repeat([]byte("GPU state."), images.BlockBytes/10+1)[:images.BlockBytes]
	area := images.Area{File: images.AreaFile(1, 0), Start: 0x7f0000000000, Bytes: images.BlockBytes, Digests: []string{images.DigestBlock(data)}}
	err := errors.Join(os.Mkdir(from, 0o700), os.WriteFile(filepath.Join(from, "inventory.img"), []byte("x"), 0o600), os.WriteFile(filepath.Join(from, area.File), data, 0o600),
		images.WriteMetadata(from, &images.Metadata{
			SchemaVersion: images.SchemaVersion, Created: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), DriverVersion: "580.159.04", CUDAVersion: "13.0",
			GPUs:      []images.GPU{{UUID: "GPU-5eb2b1b0-1d6c-4cba-8d8a-0a1b2c3d4e5f", Name: "NVIDIA H200", Memory: 150 << 30}},
			Processes: []images.Process{{PID: 1, State: "running", GPUs: []string{"GPU-5eb2b1b0-1d6c-4cba-8d8a-0a1b2c3d4e5f"}, Bytes: area.Bytes, Areas: []images.Area{area}}},
		}))
	if err != nil {
		t.Fatal(err)
	}
	whole, err := OpenDump(from)
	if err != nil {
		t.Fatal(err)
	}
	at := Ref{Kind: InLayout, Path: filepath.Join(dir, "layout"), Name: "example.com/job:1"}
	store, err := layout.Open(at.Path)
	if err != nil {
		t.Fatal(err)
	}
	made, err := oci.Build(t.Context(), store, oci.Options{Checkpoint: whole})
	if err == nil {
		err = errors.Join(store.Tag(t.Context(), at.Name, made.Manifest), store.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	kube := Ref{Kind: InKubernetes, Path: filepath.Join(dir, "kube.tar")}
	back := Ref{Kind: InLayout, Path: filepath.Join(dir, "back"), Name: at.Name}
	if _, err := Convert(t.Context(), at, kube, Options{}); err != nil {
		t.Fatal(err)
	}
	if _, err := Convert(t.Context(), kube, back, Options{Base: at.String()}); err != nil {
		t.Fatal(err)
	}
	digests := make(map[string]int)
	for _, of := range []Ref{at, back} {
		src, err := Open(t.Context(), of, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer src.Close()
		found, err := oci.Inspect(t.Context(), src.Provider, *src.Image)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range found.Layers {
			if l.MediaType == oci.MediaTypeGPU {
				digests[l.Digest.String()]++
			}
		}
	}
	if len(digests) != 1 || slices.Collect(maps.Values(digests))[0] != 2 {
		t.Errorf("the blobs are %v", digests)
	}
}

// A blob that is not as long as its image says is damage, however long that is.
func TestUnpackComparesSizes(t *testing.T) {
	data := make([]byte, 4096)
	memory := oci.Layer{Digest: digest.FromBytes(data), MediaType: oci.MediaTypeGPU, Bytes: 1 << 62, Kind: oci.LayerMemory, Area: "pages-1.img"}
	_, err := unpack(t.Context(), twoBlobs{archive: data}, &oci.Image{Layers: []oci.Layer{memory}}, t.TempDir(), nil, oci.LayerMemory)
	if !errors.Is(err, images.ErrDamaged) || !strings.Contains(err.Error(), "has 4096 bytes") {
		t.Errorf("got %v", err)
	}
}

func TestOpenDumpRefuses(t *testing.T) {
	dir := t.TempDir()
	if _, err := OpenDump(dir); err == nil || !strings.Contains(err.Error(), dir+" is not a checkpoint") {
		t.Errorf("an empty directory: %v", err)
	}
}

// twoBlobs is a store of an index and an archive.
type twoBlobs struct{ index, archive []byte }

func (o twoBlobs) ReaderAt(_ context.Context, desc ocispec.Descriptor) (content.ReaderAt, error) {
	for _, b := range [][]byte{o.index, o.archive} {
		if digest.FromBytes(b) == desc.Digest {
			return blob{bytes.NewReader(b)}, nil
		}
	}
	return nil, errdefs.ErrNotFound
}

type blob struct{ *bytes.Reader }

func (blob) Close() error { return nil }

// Where the index names ARCHIVE it is made to name the archive.
func FuzzOpenContainerd(f *testing.F) {
	f.Add([]byte(`{"manifests":[{"mediaType":"`+cimages.MediaTypeContainerd1Checkpoint+`","digest":"ARCHIVE","size":1}]}`), packed(f, map[string]string{"inventory.img": "x"}))
	f.Fuzz(func(t *testing.T, index, archive []byte) {
		index = bytes.ReplaceAll(index, []byte("ARCHIVE"), []byte(digest.FromBytes(archive)))
		desc := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageIndex, Digest: digest.FromBytes(index), Size: int64(len(index))}
		if s, err := OpenContainerd(t.Context(), twoBlobs{index, archive}, desc); err == nil {
			_, _, _ = s.Record(t.Context())
			s.Close()
		}
	})
}
