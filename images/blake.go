// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"lukechampine.com/blake3/guts"
)

// blakeUnit is what the library's widest instructions compress at once: 16 chunks.
const blakeUnit = guts.MaxSIMD * guts.ChunkSize

// blake computes a BLAKE3 digest of 256 bits in the thread that calls it. The library's own hash
// starts goroutines for each write, on threads that nobody has made yield to the driver.
//
// The tree is that of the BLAKE3 paper, section 2.1: units are its subtrees of 16 chunks, and the
// last one, which may be the root, waits in last until it is known to be the last.
type blake struct {
	last   [blakeUnit]byte
	length int
	units  uint64
	touch  byte // what fetch has read, so that it is not compiled away
	// subtrees has the chaining value of the subtree of 1<<i units, for each bit i in units.
	subtrees [64][8]uint32
}

// Write adds to what is digested.
func (b *blake) Write(p []byte) {
	for len(p) > 0 {
		if b.length == blakeUnit {
			b.add(&b.last)
			b.length = 0
		}
		if b.length == 0 && len(p) > blakeUnit {
			b.fetch((*[blakeUnit]byte)(p))
			b.add((*[blakeUnit]byte)(p))
			p = p[blakeUnit:]
			continue
		}
		n := copy(b.last[b.length:], p)
		b.length += n
		p = p[n:]
	}
}

// fetch brings a unit into the processor's cache: it reads each line, in order. The library reads a
// line of each of 16 chunks in turn, which no prefetcher follows. Of memory that no cache has, BLAKE3
// is by half faster with it (BenchmarkDigestBlock).
func (b *blake) fetch(unit *[blakeUnit]byte) {
	const line = 64
	for i := 0; i < blakeUnit; i += line {
		b.touch ^= unit[i]
	}
}

// add adds a unit that is not the last one.
func (b *blake) add(unit *[blakeUnit]byte) {
	value := guts.ChainingValue(b.node(unit, blakeUnit))
	height := 0
	for ; b.units>>height&1 != 0; height++ {
		value = guts.ChainingValue(guts.ParentNode(b.subtrees[height], value, &guts.IV, 0))
	}
	b.subtrees[height] = value
	b.units++
}

func (b *blake) node(unit *[blakeUnit]byte, length int) guts.Node {
	return guts.CompressBuffer(unit, length, &guts.IV, b.units*guts.MaxSIMD, 0)
}

// Sum returns the digest of all that was written. It changes nothing.
func (b *blake) Sum() [32]byte {
	root := b.node(&b.last, b.length)
	for height := range b.subtrees {
		if b.units>>height&1 != 0 {
			root = guts.ParentNode(b.subtrees[height], guts.ChainingValue(root), &guts.IV, 0)
		}
	}
	root.Flags |= guts.FlagRoot
	out := guts.WordsToBytes(guts.CompressNode(root))
	return [32]byte(out[:])
}
