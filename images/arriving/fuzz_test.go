// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package arriving

import (
	"archive/tar"
	"bytes"
	"errors"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

// within fails what writes beyond a file of so many bytes.
type within int64

var errBeyond = errors.New("beyond the file")

func (w within) WriteAt(p []byte, at int64) (int, error) {
	if at < 0 || at+int64(len(p)) > int64(w) {
		return 0, errBeyond
	}
	return len(p), nil
}

// A layer that a registry sends writes nothing but its own part of its area, whatever is in it.
func FuzzLayer(f *testing.F) {
	const layerBytes = 8 << 20
	for _, name := range []string{images.PieceFile("gpu-1-0", layerBytes), images.PieceFile("gpu-1-0", 3*layerBytes), "../../x"} {
		var archive bytes.Buffer
		w := tar.NewWriter(&archive)
		_ = w.WriteHeader(&tar.Header{Name: images.ImageDir + "/", Typeflag: tar.TypeDir, Mode: 0o700})
		_ = w.WriteHeader(&tar.Header{Name: images.ImageDir + "/" + name, Typeflag: tar.TypeReg, Size: 4096, Mode: 0o600})
		_, _ = w.Write(make([]byte, 4096))
		_ = w.Close()
		f.Add(archive.Bytes(), uint64(layerBytes))
	}
	f.Fuzz(func(t *testing.T, data []byte, offset uint64) {
		l := &Target{LayerBytes: layerBytes, Layer: oci.Layer{
			Digest: digest.FromBytes(data), DiffID: digest.FromBytes(data), MediaType: ocispec.MediaTypeImageLayer,
			Area: "gpu-1-0", Offset: offset,
		}}
		if offset%layerBytes != 0 { // Make refuses it
			return
		}
		if err := l.fill(within(layerBytes), bytes.NewReader(data)); errors.Is(err, errBeyond) {
			t.Fatal(err)
		}
	})
}
