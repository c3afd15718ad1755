// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bytes"
	"io"
	"math/rand"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// countedReader counts the reads of what may be a content store's.
type countedReader struct {
	io.Reader
	reads int
}

func (r *countedReader) Read(p []byte) (int, error) {
	r.reads++
	return r.Reader.Read(p)
}

// A compressed layer is read in large pieces: each may be a call of containerd.
func TestDecompressReadsMuchAtATime(t *testing.T) {
	data := make([]byte, 8<<20)
	rand.New(rand.NewSource(1)).Read(data) //nolint:gosec // any data that does not compress
	for mediaType, c := range map[string]Compression{
		ocispec.MediaTypeImageLayerZstd: Zstd,
		ocispec.MediaTypeImageLayerGzip: Gzip,
		"":                              Zstd, // it goes by how the layer begins
	} {
		from := &countedReader{Reader: bytes.NewReader(packedBy(t, data, testPack(t, c, 1)))}
		plain, err := Decompress(from, mediaType)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(plain)
		if err != nil || !bytes.Equal(got, data) {
			t.Fatalf("%q: %d bytes came back wrong, error %v", mediaType, len(got), err)
		}
		if most := len(data)/readBytes + 3; from.reads > most {
			t.Errorf("%q: %d reads, at most %d", mediaType, from.reads, most)
		}
	}
}
