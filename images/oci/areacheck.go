// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"fmt"
	"io"
	"strconv"
	"sync"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
)

// areaCheck compares the blocks of an area while its layers are read in any
// order, several at once. Blocks are counted from the begin of the range and
// layers from that of the file, at most 2 MiB before: so of each layer the
// first bytes end the last block of the layer before. These are kept until both
// have been read, and the digest of a block goes on in the next layer.
type areaCheck struct {
	v     *verifier
	area  images.Area
	size  uint64 // of a layer's range
	taken map[uint64]bool

	mu     sync.Mutex
	heads  map[uint64][]byte            // by the layer's offset
	tails  map[uint64]*images.BlockHash // by the offset where they break off
	failed map[uint64]bool              // layers that could not be read
}

func newAreaCheck(v *verifier, a images.Area, size uint64) *areaCheck {
	return &areaCheck{
		v: v, area: a, size: size, taken: make(map[uint64]bool),
		heads: make(map[uint64][]byte), tails: make(map[uint64]*images.BlockHash), failed: make(map[uint64]bool),
	}
}

func (a *areaCheck) end() uint64 { return a.area.Offset + a.area.Bytes }

// take reads the annotation of a layer that holds a part of the area.
func (a *areaCheck) take(offset string) (uint64, error) {
	at, err := strconv.ParseUint(offset, 10, 64)
	switch {
	case err != nil || at%a.size != 0 || at >= a.end():
		return 0, fmt.Errorf("annotation %s is %q", annotations.Offset, offset)
	case a.taken[at]:
		return 0, fmt.Errorf("there are two layers of %s from %d", a.area.File, at)
	}
	a.taken[at] = true
	return at, nil
}

// untaken returns the offsets that have no layer.
func (a *areaCheck) untaken() (offsets []uint64) {
	for at := uint64(0); at < a.end(); at += a.size {
		if !a.taken[at] {
			offsets = append(offsets, at)
		}
	}
	return offsets
}

// fail notes that a layer could not be read to its end.
func (a *areaCheck) fail(at uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.failed[at] = true
}

// readLayer compares the blocks that a layer's archive holds.
func (a *areaCheck) readLayer(begin uint64, r io.Reader) error {
	w := a.writer(begin)
	err := images.ReadLayer(r, func(name string, size int64, r io.Reader) error {
		file, offset, ok := images.ParsePieceFile(name)
		if !ok || file != a.area.File || size <= 0 || offset%images.PieceAlign != 0 || offset < w.at || offset+uint64(size) < offset || offset+uint64(size) > w.end {
			return fmt.Errorf("%w: %s, %d bytes, is not a piece of %s from %d to %d", images.ErrDamaged, name, size, a.area.File, w.at, w.end)
		}
		w.zeros(offset)
		if _, err := io.CopyN(w, r, size); err != nil {
			return fmt.Errorf("%w: %s: %w", images.ErrDamaged, name, err)
		}
		return nil
	})
	if err == nil {
		w.close()
	}
	return err
}

// zero compares the blocks of a range that no layer holds.
func (a *areaCheck) zero(begin uint64) { a.writer(begin).close() }

// finish compares the blocks that two layers share.
func (a *areaCheck) finish() {
	for at, h := range a.tails {
		if a.failed[at] || a.failed[at-a.size] {
			continue // that fault is noted already
		}
		h.Write(a.heads[at])
		a.compare((at-1-a.area.Offset)/images.BlockBytes, h.Digest())
	}
}

// compare notes a block that has another digest.
func (a *areaCheck) compare(block uint64, got string) {
	if want := a.area.Digests[block]; got != want {
		at := a.area.Offset + block*images.BlockBytes
		a.v.fault(&images.BlockError{
			Area: a.area.File, Block: int(block), Got: got, Want: want,
			Path: fmt.Sprintf("layer of %s from %d", a.area.File, at-at%a.size),
		})
	}
}

// rangeWriter takes the bytes of one layer's range in order.
type rangeWriter struct {
	a              *areaCheck
	begin, at, end uint64
	head           []byte            // of the block that began before the range
	block          *images.BlockHash // the one at hand; nil before and between
}

func (a *areaCheck) writer(begin uint64) *rangeWriter {
	return &rangeWriter{a: a, begin: begin, at: begin, end: min(begin+a.size, a.end())}
}

// Write never fails.
func (w *rangeWriter) Write(p []byte) (int, error) {
	whole := len(p)
	for len(p) > 0 {
		begin := w.a.area.Offset
		if w.at < begin { // what is before the area's range means nothing
			n := min(uint64(len(p)), begin-w.at)
			p, w.at = p[n:], w.at+n
			continue
		}
		number := (w.at - begin) / images.BlockBytes
		from := begin + number*images.BlockBytes
		to := min(from+images.BlockBytes, w.a.end())
		part := p[:min(uint64(len(p)), to-w.at)]
		if from < w.begin {
			w.head = append(w.head, part...)
		} else {
			if w.block == nil {
				w.block = images.NewBlockHash()
			}
			w.block.Write(part)
			if w.at+uint64(len(part)) == to {
				w.a.compare(number, w.block.Digest())
				w.block = nil
			}
		}
		p, w.at = p[len(part):], w.at+uint64(len(part))
	}
	return whole, nil
}

// zeros goes on to an offset; what is between is zero.
func (w *rangeWriter) zeros(to uint64) {
	buf := make([]byte, 256<<10)
	for w.at < to {
		if begin := w.a.area.Offset; w.block == nil && w.at >= begin && (w.at-begin)%images.BlockBytes == 0 && to-w.at >= images.BlockBytes {
			w.a.compare((w.at-begin)/images.BlockBytes, images.ZeroBlockDigest)
			w.at += images.BlockBytes
			continue
		}
		_, _ = w.Write(buf[:min(uint64(len(buf)), to-w.at)])
	}
}

// close ends the range: the rest is zero. It hands over what other layers' blocks need.
func (w *rangeWriter) close() {
	w.zeros(w.end)
	w.a.mu.Lock()
	defer w.a.mu.Unlock()
	w.a.heads[w.begin] = w.head
	if w.block != nil {
		w.a.tails[w.end] = w.block
	}
}
