// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import "github.com/opencontainers/go-digest"

// Aside digests what is written to it beside its writer, which another processor can be for: SHA-256 takes longer than to
// read or to write. Digest must be called, once, also when what was written is of no use.
type Aside struct {
	full, free chan []byte
	buf        []byte
	result     chan digest.Digest
}

// asideBytes is what is handed over at a time.
const asideBytes = 256 << 10

// NewAside begins a digest of the algorithm digest.Canonical.
func NewAside() *Aside {
	h := &Aside{full: make(chan []byte, 2), free: make(chan []byte, 3), result: make(chan digest.Digest, 1)}
	for range cap(h.free) {
		h.free <- make([]byte, 0, asideBytes)
	}
	h.buf = <-h.free
	go func() {
		d := digest.Canonical.Digester()
		for b := range h.full {
			d.Hash().Write(b)
			h.free <- b[:0]
		}
		h.result <- d.Digest()
	}()
	return h
}

// Write never fails.
func (h *Aside) Write(p []byte) (int, error) {
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

// Digest returns the digest of all that was written.
func (h *Aside) Digest() digest.Digest {
	h.full <- h.buf
	close(h.full)
	return <-h.result
}
