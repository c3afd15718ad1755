// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"math/bits"
	"unsafe"

	"lukechampine.com/blake3/guts"
)

// blakeUnit is what the widest instructions compress at once: 16 chunks.
const blakeUnit = guts.MaxSIMD * guts.ChunkSize

// blakeGroup is how many units have their chunks' values merged at once, 16 parents at a time.
const (
	blakeGroupBits = 4
	blakeGroup     = 1 << blakeGroupBits
)

// blake computes a BLAKE3 digest of 256 bits in the thread that calls it. The library's own hash
// starts goroutines for each write, on threads that nobody has made yield to the driver.
//
// The tree is that of the BLAKE3 paper, section 2.1: units are its subtrees of 16 chunks, and the
// last one, which may be the root, waits in last until it is known to be the last. With AVX-512,
// compress16 of this package does the work: it takes half of the library's time, whose 16 loads of
// a word each from 16 places are slow (BenchmarkDigestBlock). Else the library does.
type blake struct {
	last   [blakeUnit]byte
	length int
	units  uint64
	first  uint64 // the number of the first unit, not 0 in a part
	touch  byte   // what fetch has read, so that it is not compiled away
	// subtrees has the chaining value of the subtree of 1<<i units, for each bit i in units. With
	// compress16, chunks has those of the last units%blakeGroup units in their place.
	subtrees [64][8]uint32
	chunks   [blakeGroup][16][8]uint32
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
	if !wide {
		b.fetch(unit)
		b.merge(guts.ChainingValue(b.node(unit, blakeUnit)), 0)
		b.units++
		return
	}
	var counters [2][16]uint32
	for i := range uint64(16) {
		counter := (b.first+b.units)*guts.MaxSIMD + i
		counters[0][i], counters[1][i] = uint32(counter), uint32(counter>>32)
	}
	compress16(&b.chunks[b.units%blakeGroup], &unit[0], guts.ChunkSize, guts.ChunkSize/guts.BlockSize, &counters, &chunkFlags)
	if b.units%blakeGroup == blakeGroup-1 {
		b.merge(subtree(b.chunks[:]), blakeGroupBits)
	}
	b.units++
}

// merge adds a subtree of 1<<height units to those before it.
func (b *blake) merge(value [8]uint32, height int) {
	for ; b.units>>height&1 != 0; height++ {
		value = guts.ChainingValue(guts.ParentNode(b.subtrees[height], value, &guts.IV, 0))
	}
	b.subtrees[height] = value
}

// fetch brings a unit into the processor's cache: it reads each line, in order. The library reads a
// line of each of 16 chunks in turn, which no prefetcher follows. Of memory that no cache has, BLAKE3
// is by half faster with it.
func (b *blake) fetch(unit *[blakeUnit]byte) {
	const line = 64
	for i := 0; i < blakeUnit; i += line {
		b.touch ^= unit[i]
	}
}

func (b *blake) node(unit *[blakeUnit]byte, length int) guts.Node {
	return guts.CompressBuffer(unit, length, &guts.IV, (b.first+b.units)*guts.MaxSIMD, 0)
}

// A part is a subtree of units that is computed apart from what is before it.
const (
	blakePartBits  = 8
	blakePartBytes = blakeUnit << blakePartBits
)

// newPart returns the hash of a part, by its number. All of its bytes are written to it, and then it has a
// value.
func newPart(number uint64) *blake { return &blake{first: number << blakePartBits} }

// value returns the chaining value of a part.
func (b *blake) value() [8]uint32 {
	b.add(&b.last)
	return b.subtrees[blakePartBits]
}

// addPart adds the value of a part that is not the last of what is digested. Before it are parts alone.
func (b *blake) addPart(value [8]uint32) {
	b.merge(value, blakePartBits)
	b.units += 1 << blakePartBits
}

// Sum returns the digest of all that was written. It changes nothing.
func (b *blake) Sum() [32]byte {
	root := b.node(&b.last, b.length)
	for height := range b.subtrees {
		if b.units>>height&1 == 0 {
			continue
		}
		value := b.subtrees[height]
		if wide && height < blakeGroupBits {
			end := b.units % blakeGroup >> height << height
			value = subtree(b.chunks[end-1<<height : end])
		}
		root = guts.ParentNode(value, guts.ChainingValue(root), &guts.IV, 0)
	}
	root.Flags |= guts.FlagRoot
	out := guts.WordsToBytes(guts.CompressNode(root))
	return [32]byte(out[:])
}

// rootOf returns the digest of what has two or more subtrees of equal size, but for the last, by their values.
func rootOf(values [][8]uint32) [32]byte {
	root := parentOf(values)
	root.Flags |= guts.FlagRoot
	out := guts.WordsToBytes(guts.CompressNode(root))
	return [32]byte(out[:])
}

// parentOf returns the node above subtrees: the left one of its children is as large as it can be.
func parentOf(values [][8]uint32) guts.Node {
	left := 1 << (bits.Len(uint(len(values)-1)) - 1)
	return guts.ParentNode(valueOf(values[:left]), valueOf(values[left:]), &guts.IV, 0)
}

func valueOf(values [][8]uint32) [8]uint32 {
	if len(values) == 1 {
		return values[0]
	}
	return guts.ChainingValue(parentOf(values))
}

// The flags of compress16: of the blocks of a chunk, and of the one of a parent.
var (
	chunkFlags  = [16]uint32{0: guts.FlagChunkStart, guts.ChunkSize/guts.BlockSize - 1: guts.FlagChunkEnd}
	parentFlags = [16]uint32{guts.FlagParent}
)

// subtree returns the chaining value of a subtree of 1, 2, 4 ... units, by those of its chunks. After
// the last unit there must be another one, unless there are blakeGroup: compress16 reads 32 values.
func subtree(chunks [][16][8]uint32) [8]uint32 {
	var values [blakeGroup / 2][16][8]uint32
	var counters [2][16]uint32 // a parent's is 0
	for from, n := chunks, 16*len(chunks); n > 1; from, n = values[:], n/2 {
		for i := 0; i < n; i += 32 {
			in := (*byte)(unsafe.Pointer(&from[i/16]))
			compress16(&values[i/32], in, guts.BlockSize, 1, &counters, &parentFlags)
		}
	}
	return values[0][0]
}
