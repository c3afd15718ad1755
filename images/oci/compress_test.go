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
		var compressed bytes.Buffer
		w, err := c.writer(&compressed, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		from := &countedReader{Reader: &compressed}
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

// A layer that is alone is compressed by several processors, to the same bytes as by one.
func TestCompressBySeveral(t *testing.T) {
	data := make([]byte, 5*frameBytes+100)
	rand.New(rand.NewSource(1)).Read(data[:len(data)/2]) //nolint:gosec // any data
	var one []byte
	for _, processors := range []int{1, 3} {
		var compressed bytes.Buffer
		w, err := Zstd.writer(&compressed, 0, processors)
		if err != nil {
			t.Fatal(err)
		}
		for n := range processors + 1 {
			if compressed.Len() > 0 {
				t.Fatalf("%d processors: after %d frames one was waited for", processors, n)
			}
			if _, err := w.Write(data[n*frameBytes : (n+1)*frameBytes]); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := w.Write(data[(processors+1)*frameBytes:]); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if one == nil {
			one = bytes.Clone(compressed.Bytes())
		}
		if !bytes.Equal(compressed.Bytes(), one) {
			t.Errorf("%d processors make other bytes", processors)
		}
		plain, err := Decompress(&compressed, ocispec.MediaTypeImageLayerZstd)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(plain); err != nil || !bytes.Equal(got, data) {
			t.Fatalf("%d processors: %d bytes came back wrong, error %v", processors, len(got), err)
		}
	}
}
