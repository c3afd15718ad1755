// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package arriving

import (
	"io"
	"runtime"

	"github.com/opencontainers/go-digest"

	"github.com/gpuckpt/gpuckpt/images/registry"
)

// hasher digests what is written to it.
type hasher interface {
	io.Writer
	// end returns the digest. It is called once, in any case.
	end() digest.Digest
}

// newHasher returns one for a fetch of several at once. Where there are more processors than fetches
// it works aside: SHA-256 is the slowest part of a fetch.
func newHasher(a digest.Algorithm) hasher {
	if runtime.NumCPU() > registry.DefaultParallel() {
		return newAside(a)
	}
	return &inPlace{a.Digester()}
}

// inPlace digests in Write.
type inPlace struct{ digest.Digester }

func (h *inPlace) Write(p []byte) (int, error) { return h.Hash().Write(p) }

func (h *inPlace) end() digest.Digest { return h.Digest() }

// asideBytes is what an aside collects before it hands it over, in bytes.
const asideBytes = 256 << 10

// aside digests in a goroutine of its own, which ends with end.
type aside struct {
	full, free chan []byte
	buf        []byte
	result     chan digest.Digest
}

func newAside(a digest.Algorithm) *aside {
	h := &aside{full: make(chan []byte, 2), free: make(chan []byte, 3), result: make(chan digest.Digest, 1)}
	for range cap(h.free) {
		h.free <- make([]byte, 0, asideBytes)
	}
	h.buf = <-h.free
	go func() {
		d := a.Digester()
		for b := range h.full {
			d.Hash().Write(b)
			h.free <- b[:0]
		}
		h.result <- d.Digest()
	}()
	return h
}

func (h *aside) Write(p []byte) (int, error) {
	for rest := p; len(rest) > 0; {
		n := min(len(rest), cap(h.buf)-len(h.buf))
		h.buf = append(h.buf, rest[:n]...)
		if rest = rest[n:]; len(h.buf) == cap(h.buf) {
			h.full <- h.buf
			h.buf = <-h.free
		}
	}
	return len(p), nil
}

func (h *aside) end() digest.Digest {
	h.full <- h.buf
	close(h.full)
	return <-h.result
}
