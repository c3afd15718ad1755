// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bytes"
	"io"
	"testing"

	"github.com/klauspost/compress/zstd"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// A frame of raw blocks is what was written, however it was written, to a decoder that has no more
// room than for a block.
func TestRawFrame(t *testing.T) {
	d, err := zstd.NewReader(nil, zstd.WithDecoderMaxWindow(rawBlock), zstd.WithDecoderConcurrency(1))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	for _, size := range []int{0, 1, rawBlock - 1, rawBlock, rawBlock + 1, 2 * rawBlock, 5<<20 + 7} {
		for _, step := range []int{1 << 20, rawBlock, 4093} {
			data := random(size)
			var out bytes.Buffer
			w := newRawWriter(&out)
			for from := 0; from < size; from += step {
				if n, err := w.Write(data[from:min(size, from+step)]); err != nil || n != min(size, from+step)-from {
					t.Fatal(n, err)
				}
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			blocks := max(1, (size+rawBlock-1)/rawBlock)
			if want := len(rawFrame) + blocks*rawBlockHeader + size; out.Len() != want {
				t.Errorf("%d bytes are %d as a frame, want %d", size, out.Len(), want)
			}
			if err := d.Reset(&out); err != nil {
				t.Fatal(err)
			}
			if got, err := io.ReadAll(d); err != nil || !bytes.Equal(got, data) {
				t.Errorf("%d bytes, by %d: %d came back: %v", size, step, len(got), err)
			}
		}
	}
}

// What zstd makes no smaller is stored in raw blocks, unless a level is asked for; and only that. The
// media type says zstd of both.
func TestWhatDoesNotCompressIsStoredInRawBlocks(t *testing.T) {
	dull := bytes.Repeat([]byte("dull text, "), 3<<20/11+1)[:3<<20]
	// A tenth of the layer compresses, which is more than the least that counts.
	mixed := append(random(9<<20), dull[:1<<20]...)
	for name, test := range map[string]struct {
		content []byte
		o       Options
		raw     bool
	}{
		"noise":           {random(3 << 20), Options{}, true},
		"noise, by level": {random(3 << 20), Options{Level: 1}, false},
		"text":            {dull, Options{}, false},
		"a page":          {random(4096), Options{}, true},
		"a tenth is text": {mixed, Options{}, false},
	} {
		store := newLayout(t)
		r := build(t, store, newCheckpoint(t, 0, test.content), test.o)
		if _, err := Verify(t.Context(), store, r.Manifest, nil); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		image, err := Inspect(t.Context(), store, r.Manifest)
		if err != nil {
			t.Fatal(err)
		}
		gpu := 0
		for _, l := range image.Layers {
			if l.Kind != LayerGPU {
				continue
			}
			gpu++
			if raw := isRaw(t, store, l.Descriptor()); raw != test.raw || l.MediaType != ocispec.MediaTypeImageLayerZstd || l.DiffID == l.Digest {
				t.Errorf("%s: raw blocks: %v, want %v; the layer is %s, %s unpacked, of %s", name, raw, test.raw, l.Digest, l.DiffID, l.MediaType)
			}
		}
		if gpu != 1 {
			t.Errorf("%s: %d layers of GPU state", name, gpu)
		}
	}
}

// isRaw reports whether a layer is a frame that begins with a raw block.
func isRaw(t *testing.T, store *testLayout, layer ocispec.Descriptor) bool {
	t.Helper()
	data, err := store.ReaderAt(t.Context(), layer)
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	begin := make([]byte, 512)
	n, err := data.ReadAt(begin, 0)
	if err != nil && n < len(rawFrame)+rawBlockHeader {
		t.Fatal(err)
	}
	return string(begin[:len(rawFrame)]) == rawFrame
}

// BenchmarkLayer is what random numbers cost whoever makes a layer of them, and whoever unpacks it.
func BenchmarkLayer(b *testing.B) {
	data := random(64 << 20)
	for _, c := range []struct {
		name string
		pack func(io.Writer) (io.WriteCloser, error)
	}{
		{"raw", func(w io.Writer) (io.WriteCloser, error) { return newRawWriter(w), nil }},
		{"compressed", testPack(b, Zstd, 1)},
	} {
		var layer bytes.Buffer
		b.Run(c.name+"/make", func(b *testing.B) {
			b.SetBytes(int64(len(data)))
			for b.Loop() {
				layer.Reset()
				w, err := c.pack(&layer)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := w.Write(data); err != nil {
					b.Fatal(err)
				}
				if err := w.Close(); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(c.name+"/unpack", func(b *testing.B) {
			b.SetBytes(int64(len(data)))
			buf := make([]byte, 1<<20)
			for b.Loop() {
				r, err := Decompress(bytes.NewReader(layer.Bytes()), ocispec.MediaTypeImageLayerZstd, 1)
				if err != nil {
					b.Fatal(err)
				}
				n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{r}, buf)
				if err != nil || n != int64(len(data)) {
					b.Fatal(n, err)
				}
				r.Close()
			}
		})
	}
}
