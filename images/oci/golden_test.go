// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci_test

import (
	"path/filepath"
	"testing"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/layout"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

// The image in testdata was built by the first commit of main that could, ec433ce.
// Every later commit reads it: see docs/internals/format.md, "What may change how".
func TestGoldenImage(t *testing.T) {
	store, err := layout.OpenTar(filepath.Join("testdata", "schema-1.tar"))
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	desc, err := store.Get("golden:1")
	if err != nil {
		t.Fatal(err)
	}
	image, err := oci.Inspect(t.Context(), store, desc)
	if err != nil {
		t.Fatal(err)
	}
	if image.Annotations[annotations.Schema] != "1" || image.Annotations[annotations.GPUModels] != "NVIDIA H200" || image.BaseName != "registry.example/base:1" {
		t.Errorf("annotations %v", image.Annotations)
	}
	if a := image.Metadata.Processes[0].Areas[0]; a.File != "gpu-1-0" || a.Bytes != 24<<20 || a.Offset != 4096 {
		t.Errorf("area %+v", a)
	}
	report, err := oci.Verify(t.Context(), store, desc, nil)
	if err != nil {
		t.Fatal(err)
	}
	if report.Layers != 3 || report.Blocks != 1 || report.GPUBytes != 24<<20 {
		t.Errorf("verified %+v", report)
	}
}
