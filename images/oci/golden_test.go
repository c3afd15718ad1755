// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci_test

import (
	"path/filepath"
	"slices"
	"testing"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/layout"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

// golden opens an image in testdata. Every later commit reads it: see docs/internals/format.md, "What may change how".
func golden(t *testing.T, file string) (*oci.Image, *oci.Report) {
	t.Helper()
	store, err := layout.OpenTar(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	desc, err := store.Get("golden:1")
	if err != nil {
		t.Fatal(err)
	}
	image, err := oci.Inspect(t.Context(), store, desc)
	if err != nil {
		t.Fatal(err)
	}
	report, err := oci.Verify(t.Context(), store, desc, nil)
	if err != nil {
		t.Fatal(err)
	}
	if image.Annotations[annotations.GPUModels] != "NVIDIA H200" || image.BaseName != "registry.example/base:1" {
		t.Errorf("annotations %v", image.Annotations)
	}
	return image, report
}

// This one was built by the first commit of main that could, ec433ce.
func TestGoldenImage(t *testing.T) {
	image, report := golden(t, "schema-1.tar")
	if image.Annotations[annotations.Schema] != "1" {
		t.Errorf("annotations %v", image.Annotations)
	}
	if a := image.Metadata.Processes[0].Areas[0]; a.File != "gpu-1-0" || a.Bytes != 24<<20 || a.Offset != 4096 {
		t.Errorf("area %+v", a)
	}
	if report.Layers != 3 || report.Blocks != 1 || report.GPUBytes != 24<<20 {
		t.Errorf("verified %+v", report)
	}
}

// This one by the first commit whose images have GPU state in blobs. It has two, of a page each: the rest is zero.
func TestGoldenImageOfBlobs(t *testing.T) {
	image, report := golden(t, "schema-2-blobs.tar")
	if image.Annotations[annotations.Schema] != "2" {
		t.Errorf("annotations %v", image.Annotations)
	}
	var kinds []string
	for _, l := range image.Layers {
		kinds = append(kinds, l.Kind)
		if (l.Kind == oci.LayerGPU) != (l.MediaType == oci.MediaTypeGPU && l.DiffID == "" && l.Bytes == 4096) {
			t.Errorf("layer %+v", l)
		}
	}
	if want := []string{oci.LayerIndex, oci.LayerCRIU, oci.LayerGPU, oci.LayerGPU}; !slices.Equal(kinds, want) {
		t.Errorf("it has %q, want %q", kinds, want)
	}
	if len(image.Metadata.Processes[0].Areas) != 2 || report.GPUBytes != 2*(6<<20+4096) {
		t.Errorf("verified %+v of %+v", report, image.Metadata.Processes[0].Areas)
	}
}

// This one by the first commit whose images have memory in blobs. It has one, the last page of 64 MiB and a page.
func TestGoldenImageOfMemory(t *testing.T) {
	image, _ := golden(t, "schema-2-memory.tar")
	at := slices.IndexFunc(image.Layers, func(l oci.Layer) bool { return l.Kind == oci.LayerMemory })
	if at < 0 || image.Layers[at].Area != "pages-1.img" || image.Layers[at].Offset != 64<<20 || image.Layers[at].Bytes != 4096 {
		t.Errorf("it has %+v", image.Layers)
	}
}
