// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"sync"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
)

// areaCheck compares the blocks of an area while its parts are read in any order, several at once.
// Blocks count from the begin of the range and layers from that of the file, at most 2 MiB before.
// So the first bytes of a part end the last block of the part before: both are kept until both parts are read.
type areaCheck struct {
	v     *verifier
	area  images.Area
	size  uint64 // of a part
	parts []part
	mu    sync.Mutex // of what parts keep for each other
}

// part is what one layer holds of an area, or several blobs do. Bytes that these do not have are zero.
type part struct {
	*areaCheck
	layers  []int  // their indices; none: all is zero
	at, end uint64 // in the area's file
	begin   uint64
	head    []byte            // of the block that began before the part
	block   *images.BlockHash // the block at hand; at the end, the one that the next part ends
	whole   bool              // it was read to its end
	over    bool              // nothing more of it will be read
}

func newAreaCheck(v *verifier, a images.Area, size uint64) *areaCheck {
	c := &areaCheck{v: v, area: a, size: size}
	for at := uint64(0); at < a.End(); at += size {
		c.parts = append(c.parts, part{areaCheck: c, begin: at, at: at, end: min(at+size, a.End())})
	}
	return c
}

// take says what holds the part, or some of it, that begins at an offset, an annotation. It returns where a blob ends.
func (a *areaCheck) take(i int, l ocispec.Descriptor) (end uint64, _ error) {
	offset := l.Annotations[annotations.Offset]
	unit := a.size
	if a.v.diffIDs[i] == "" {
		unit = images.PieceAlign
	}
	at, err := strconv.ParseUint(offset, 10, 64)
	if err != nil || at%unit != 0 || at >= a.area.End() {
		return 0, fmt.Errorf("annotation %s is %q", annotations.Offset, offset)
	}
	p := &a.parts[at/a.size]
	if len(p.layers) > 0 && (unit == a.size || a.v.diffIDs[p.layers[0]] != "") {
		return 0, fmt.Errorf("there are two layers of %s from %d", a.area.File, at)
	}
	p.layers = append(p.layers, i)
	return at + uint64(l.Size), nil
}

// check reads what holds the part.
func (p *part) check(ctx context.Context) {
	defer p.done()
	p.whole = true
	if len(p.layers) == 1 && p.v.diffIDs[p.layers[0]] != "" {
		p.whole = p.v.layer(ctx, p.layers[0], p.read)
		return
	}
	offset := func(i int) uint64 {
		at, _ := strconv.ParseUint(p.v.manifest.Layers[i].Annotations[annotations.Offset], 10, 64) // take has looked
		return at
	}
	slices.SortFunc(p.layers, func(a, b int) int { return cmp.Compare(offset(a), offset(b)) })
	for _, i := range p.layers {
		read := func(r io.Reader) error {
			return p.piece(p.v.manifest.Layers[i].Digest.String(), offset(i), uint64(p.v.manifest.Layers[i].Size), r)
		}
		if !p.whole { // what is behind a missing piece has no place: its own digest is looked at alone
			read = nil
		}
		p.whole = p.v.layer(ctx, i, read) && p.whole
	}
	if p.whole {
		p.zeros(p.end)
	}
}

// done compares the blocks that the part shares with those beside it which are over.
func (p *part) done() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.over = true
	for i := max(p.begin/p.size, 1); i <= p.begin/p.size+1 && i < uint64(len(p.parts)); i++ {
		before, after := &p.parts[i-1], &p.parts[i]
		if !before.over || !after.over {
			continue
		}
		// The fault of a part that is not whole is noted already.
		if before.block != nil && before.whole && after.whole {
			before.block.Write(after.head)
			p.compare((before.end-1-p.area.Offset)/images.BlockBytes, before.block.Digest())
		}
		before.block, after.head = nil, nil
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

// read compares the blocks that the layer's archive holds.
func (p *part) read(r io.Reader) error {
	err := images.ReadLayer(r, func(name string, size int64, r io.Reader) error {
		file, offset, ok := images.ParsePieceFile(name)
		if !ok || file != p.area.File || size <= 0 {
			return fmt.Errorf("%w: %s, %d bytes, is not a piece of %s", images.ErrDamaged, name, size, p.area.File)
		}
		return p.piece(name, offset, uint64(size), r)
	})
	if err == nil {
		p.zeros(p.end)
	}
	return err
}

// piece compares the blocks of a piece. What is between it and the one before is zero.
func (p *part) piece(name string, offset, size uint64, r io.Reader) error {
	if offset%images.PieceAlign != 0 || offset < p.at || offset+size < offset || offset+size > p.end {
		return fmt.Errorf("%w: %s, %d bytes, is not a piece of %s from %d to %d", images.ErrDamaged, name, size, p.area.File, p.at, p.end)
	}
	p.zeros(offset)
	if _, err := io.CopyN(p, r, int64(size)); err != nil {
		return fmt.Errorf("%w: %s: %w", images.ErrDamaged, name, err)
	}
	return nil
}

// Write takes the next bytes of the part. It never fails.
func (p *part) Write(b []byte) (int, error) {
	whole := len(b)
	for len(b) > 0 {
		begin := p.area.Offset
		if p.at < begin { // what is before the area's range means nothing
			n := min(uint64(len(b)), begin-p.at)
			b, p.at = b[n:], p.at+n
			continue
		}
		number := (p.at - begin) / images.BlockBytes
		from := begin + number*images.BlockBytes
		to := min(from+images.BlockBytes, p.area.End())
		bytes := b[:min(uint64(len(b)), to-p.at)]
		b, p.at = b[len(bytes):], p.at+uint64(len(bytes))
		if from < p.begin {
			p.head = append(p.head, bytes...)
			continue
		}
		if p.block == nil {
			p.block = images.NewBlockHashLike(p.area.Digests[0])
		}
		p.block.Write(bytes)
		if p.at == to {
			p.compare(number, p.block.Digest())
			p.block = nil
		}
	}
	return whole, nil
}

// zeros goes on to an offset; what is between is zero.
func (p *part) zeros(to uint64) {
	buf := make([]byte, 256<<10)
	for p.at < to {
		if begin := p.area.Offset; p.block == nil && p.at >= begin && (p.at-begin)%images.BlockBytes == 0 && to-p.at >= images.BlockBytes {
			p.compare((p.at-begin)/images.BlockBytes, images.ZeroBlockLike(p.area.Digests[0]))
			p.at += images.BlockBytes
			continue
		}
		_, _ = p.Write(buf[:min(uint64(len(buf)), to-p.at)])
	}
}
