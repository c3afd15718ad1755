// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package workloads

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/content"
	ctdimages "github.com/containerd/containerd/v2/core/images"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// notePhases notes the phases of a GPU container's last operation. A container
// without a GPU has none.
func notePhases(t *testing.T, result *harness.TestResult, k *harness.Container) {
	t.Helper()
	if _, err := shared.Timeline(k.ID); !errors.Is(err, os.ErrNotExist) {
		result.Phases(t, k)
	}
}

// noteSizes puts the size of a checkpoint image, of its parts, and of the GPU
// state of each process into the results.
func noteSizes(t *testing.T, result *harness.TestResult, ref string) {
	t.Helper()
	ctx, store := t.Context(), shared.Client().ContentStore()
	img, err := shared.Client().GetImage(ctx, ref)
	if err != nil {
		t.Fatal(err)
	}
	data, err := content.ReadBlob(ctx, store, img.Target())
	if err != nil {
		t.Fatal(err)
	}
	var index ocispec.Index
	if err := json.Unmarshal(data, &index); err != nil {
		t.Fatal(err)
	}
	whole := img.Target().Size
	for _, part := range index.Manifests {
		whole += part.Size
		switch part.MediaType {
		case ocispec.MediaTypeImageLayerGzip:
			result.Number("files_bytes", float64(part.Size))
		case ctdimages.MediaTypeContainerd1Checkpoint:
			result.Number("criu_bytes", float64(part.Size))
			ra, err := store.ReaderAt(ctx, part)
			if err != nil {
				t.Fatal(err)
			}
			defer ra.Close()
			noteMetadata(t, result, io.NewSectionReader(ra, 0, ra.Size()))
		}
	}
	result.Number("image_bytes", float64(whole))
}

// noteMetadata finds gpuckpt.json in the archive of CRIU's files. A checkpoint
// without GPU state has none.
func noteMetadata(t *testing.T, result *harness.TestResult, archive io.ReadSeeker) {
	t.Helper()
	for r := tar.NewReader(archive); ; { // it seeks from header to header
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if filepath.Base(header.Name) != images.MetadataName {
			continue
		}
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		m, err := images.ParseMetadata(data)
		if err != nil {
			t.Fatal(err)
		}
		for i, p := range m.Processes {
			result.Number(fmt.Sprintf("process%d_gpu_state_bytes", i), float64(p.Bytes))
		}
		return
	}
}

// leastGPUState is less than any PyTorch process has, in bytes: the driver's
// context alone takes some 500 MB.
const leastGPUState = 100 << 20

// wantGPUState checks that the checkpoint and the restore were those of a
// process with GPU state: what a test says of PyTorch would mean little if it had
// computed on the CPU.
func wantGPUState(t *testing.T, result *harness.TestResult) {
	t.Helper()
	var state float64 // of all processes: the first may have none
	for name, bytes := range result.Numbers {
		if strings.HasPrefix(name, "process") && strings.HasSuffix(name, "_gpu_state_bytes") {
			state += bytes
		}
	}
	if state < leastGPUState {
		t.Errorf("%.0f bytes of GPU state in the checkpoint, want %d at least", state, leastGPUState)
	}
	for _, name := range []string{"checkpoint/whole", "restore/whole"} {
		if result.Times[name] == 0 {
			t.Errorf("no phase times of the shim's: %s", name)
		}
	}
}
