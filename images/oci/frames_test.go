// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bytes"
	"errors"
	"io"
	"testing"
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

// once has an error in place of the first write.
type once struct {
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
