// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"github.com/klauspost/compress/zstd"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// testPack compresses as a build does that has so many processors, of which one makes the layer.
func testPack(t testing.TB, c Compression, processors int) func(io.Writer) (io.WriteCloser, error) {
	t.Helper()
	b, err := newBuilder(nil, Options{Compression: c, Threads: processors})
	if err != nil || !b.processors.TryAcquire(1) {
		t.Fatal(err)
	}
	return b.pack
}

// packed is data as a layer that a build with so many processors compresses.
func packed(t testing.TB, data []byte, processors int) []byte {
	t.Helper()
	return packedBy(t, data, testPack(t, Zstd, processors))
}

// packedBy is data as pack makes it.
func packedBy(t testing.TB, data []byte, pack func(io.Writer) (io.WriteCloser, error)) []byte {
	t.Helper()
	var compressed bytes.Buffer
	w, err := pack(&compressed)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return compressed.Bytes()
}

// half is data of that size of which one half compresses.
func half(size int) []byte { return append(random(size/2), make([]byte, size-size/2)...) }

// A layer is compressed by all processors that are idle, to the same bytes as by one. One that has none but its own
// waits for nobody.
func TestCompressBySeveral(t *testing.T) {
	data := half(5*frameBytes + 100)
	one := packed(t, data, 1)
	for _, processors := range []int{1, 3, 20} {
		if !bytes.Equal(packed(t, data, processors), one) {
			t.Errorf("%d processors make other bytes", processors)
		}
		var written bytes.Buffer
		w, err := testPack(t, Zstd, processors)(&written)
		if err != nil {
			t.Fatal(err)
		}
		for n := range processors { // the last one of them is in the block
			if written.Len() > 0 {
				t.Fatalf("%d processors: after %d frames one was waited for", processors, n)
			}
			if n < mostFrames {
				if _, err := w.Write(data[:frameBytes]); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// Behind a frame that could not be written nothing is.
func TestNoRoomForAFrame(t *testing.T) {
	full := &once{err: errors.New("no room")}
	w, err := testPack(t, Zstd, 2*mostFrames)(full)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(make([]byte, mostFrames*frameBytes+1)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err == nil || full.wrote > 0 {
		t.Errorf("%d bytes were written, %v", full.wrote, err)
	}
}

// A layer is decompressed by several processors to the same bytes as by one, whoever made its frames.
func TestDecompressBySeveral(t *testing.T) {
	data := half(3*frameBytes + 100)
	ours := packed(t, data, 2)
	stream := packedBy(t, data, func(w io.Writer) (io.WriteCloser, error) { return zstd.NewWriter(w) })
	raw := packed(t, random(frameBytes), 1) // blocks that do not compress
	damaged := append(append(bytes.Clone(ours[:1<<20]), ours[1<<20]^1), ours[1<<20+1:]...)
	skippable := []byte("\x50\x2a\x4d\x18\x03\x00\x00\x00abc")
	for name, layer := range map[string][]byte{
		"nothing":                  nil,
		"an empty frame":           packed(t, nil, 1),
		"small frames":             ours,
		"one byte, many times":     packed(t, make([]byte, 2*frameBytes), 1),
		"a stream":                 stream,
		"raw blocks":               raw,
		"a stream behind a frame":  append(bytes.Clone(ours), stream...),
		"frames behind a stream":   append(bytes.Clone(stream), ours...),
		"a frame to skip":          append(append(bytes.Clone(ours), skippable...), ours...),
		"cut off in a frame":       ours[:len(ours)-50],
		"cut off behind a header":  ours[:8],
		"something else behind it": append(bytes.Clone(ours), "something else"...),
		"a bit is wrong":           damaged,
		"something else":           []byte("something else"),
	} {
		want, wantErr := unpacked(layer, 1)
		got, err := unpacked(layer, 3)
		if (err == nil) != (wantErr == nil) {
			t.Errorf("%s: the error is %v, by one processor %v", name, err, wantErr)
		}
		if err == nil && !bytes.Equal(got, want) {
			t.Errorf("%s: %d bytes, by one processor %d", name, len(got), len(want))
		}
	}
	r, err := Decompress(bytes.NewReader(damaged), ocispec.MediaTypeImageLayerZstd, 3)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for range 2 {
		if n, err := io.Copy(io.Discard, r); err == nil || n > frameBytes {
			t.Errorf("of a damaged frame and those behind it %d bytes are read, %v", n, err)
		}
	}
	for _, end := range []int{0, 100, len(ours)} { // where a frame begins, in one, and behind all
		gone := errors.New("the connection is gone")
		source := &once{Reader: bytes.NewReader(ours[:end]), err: gone}
		r, err := Decompress(source, ocispec.MediaTypeImageLayerZstd, 3)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, r); !errors.Is(err, gone) {
			t.Errorf("after %d bytes the error is %v", end, err)
		}
		r.Close()
	}
	from := bytes.NewReader(ours)
	r, err = Decompress(from, ocispec.MediaTypeImageLayerZstd, 3)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if read := len(ours) - from.Len(); read <= frameBytes*3/2 { // the first one does not compress
		t.Errorf("at the first byte %d were read: nobody is at the second frame", read)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

// once has an error in place of the first end, or the first write.
type once struct {
	io.Reader
	err   error
	wrote int
}

func (o *once) Write(p []byte) (n int, err error) {
	if err, o.err = o.err, nil; err != nil {
		return 0, err
	}
	o.wrote += len(p)
	return len(p), nil
}

func (o *once) Read(p []byte) (n int, err error) {
	if n, err = o.Reader.Read(p); err != nil && o.err != nil {
		err, o.err = o.err, nil
	}
	return n, err
}

func unpacked(layer []byte, processors int) ([]byte, error) {
	r, err := Decompress(bytes.NewReader(layer), ocispec.MediaTypeImageLayerZstd, processors)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

// Several processors take and refuse what one does.
func FuzzDecompressBySeveral(f *testing.F) {
	f.Add(packed(f, []byte("some text"), 1))
	f.Add(append(packed(f, bytes.Repeat([]byte("ab"), 300), 1), packed(f, nil, 1)...))
	f.Fuzz(func(t *testing.T, layer []byte) {
		want, wantErr := unpacked(layer, 1)
		got, err := unpacked(layer, 3)
		if (err == nil) != (wantErr == nil) || err == nil && !bytes.Equal(got, want) {
			t.Errorf("%d bytes, %v; by one processor %d, %v", len(got), err, len(want), wantErr)
		}
	})
}
