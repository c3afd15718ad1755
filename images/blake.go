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
			b.add((*[blakeUnit]byte)(p))
			p = p[blakeUnit:]
			continue
		}
		n := copy(b.last[b.length:], p)
		b.length += n
		p = p[n:]
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
