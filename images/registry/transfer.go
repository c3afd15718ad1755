// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"errors"
	"io"
	"sync"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/oci"
)

// transfer is one push or pull. It counts, from any number of goroutines.
type transfer struct {
	Options
	meter *images.Meter

	mu    sync.Mutex
	blobs map[digest.Digest]*blob
}

func newTransfer(step string, o Options) *transfer {
	return &transfer{Options: o, meter: o.Progress.Begin(step, 0), blobs: make(map[digest.Digest]*blob)}
}

type blob struct {
	size    int64
	gpu     bool  // it has GPU state
	moved   int64 // bytes that went over the wire
	reached int64 // how far the progress has been told
}

// know counts a blob, and reports whether it is new.
func (t *transfer) know(d ocispec.Descriptor) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.blobs[d.Digest] != nil {
		return false
	}
	d.Size = max(d.Size, 0) // of a manifest that nobody has checked
	t.blobs[d.Digest] = &blob{size: d.Size, gpu: d.Annotations[annotations.Layer] == oci.LayerGPU}
	t.meter.Grow(d.Size)
	return true
}

// reach counts progress beyond what is counted already: a retry begins before that.
func (t *transfer) reach(d digest.Digest, at, moved int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.blobs[d]
	b.moved += moved
	if at > b.reached {
		t.meter.Add(at - b.reached)
		b.reached = at
	}
}

func (t *transfer) result() *Result {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := &Result{Blobs: len(t.blobs)}
	for _, b := range t.blobs {
		moved := min(b.moved, b.size)
		r.Bytes += b.size
		r.Moved += moved
		r.Reused += b.size - moved
		if b.gpu {
			r.GPUBytes += b.size
			r.GPUReused += b.size - moved
		}
	}
	return r
}

// moving is a blob of the store on its way. Reading fails when ctx ends: containerd's writer does not look.
type moving struct {
	*io.SectionReader
	ctx    context.Context
	of     *transfer
	digest digest.Digest
	at     int64
	err    error // of reading
}

func (m *moving) Read(p []byte) (int, error) {
	if err := context.Cause(m.ctx); err != nil {
		return 0, err
	}
	n, err := m.SectionReader.Read(p)
	m.at += int64(n)
	m.of.reach(m.digest, m.at, int64(n))
	if err != nil && !errors.Is(err, io.EOF) {
		m.err = err
	}
	return n, err
}

// Seek goes on where the other side has got to.
func (m *moving) Seek(offset int64, whence int) (_ int64, err error) {
	if m.at, err = m.SectionReader.Seek(offset, whence); err == nil {
		m.of.reach(m.digest, m.at, 0)
	}
	return m.at, err
}
