// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"testing"

	"lukechampine.com/blake3"
)

// The tree by hand is the library's, whatever the length and however it comes, with AVX-512 and
// without.
func TestBlake(t *testing.T) {
	defer func(as bool) { wide = as }(wide)
	for _, wide = range slices.Compact([]bool{wide, false}) {
		t.Run(fmt.Sprintf("wide=%v", wide), testBlake)
	}
}

func testBlake(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	all := make([]byte, 100*blakeUnit)
	for i := range all {
		all[i] = byte(random.Uint32())
	}
	lengths := []int{0, 1, 63, 64, 65, 1023, 1024, 1025, 2048, 2049, 15 << 10, blakeUnit - 1, blakeUnit, blakeUnit + 1, 2 * blakeUnit, 2*blakeUnit + 1, 3*blakeUnit + 5000, 4 * blakeUnit, 31*blakeUnit + 1, blakeGroup * blakeUnit, blakeGroup*blakeUnit + 1, 3 * blakeGroup * blakeUnit, 63*blakeUnit + 1, 64*blakeUnit + 1, 95*blakeUnit + 7, len(all)}
	for range 40 {
		lengths = append(lengths, random.IntN(len(all)))
	}
	for _, length := range lengths {
		want := blake3.Sum256(all[:length])
		for range 3 {
			b := new(blake)
			for at := 0; at < length; {
				n := min(length-at, 1+random.IntN([]int{10000, 100, 3 * blakeUnit}[random.IntN(3)]))
				if n < 100 && length > 100000 {
					n = min(length-at, 20000)
				}
				b.Write(all[at : at+n])
				at += n
			}
			if got := b.Sum(); got != want || b.Sum() != want {
				t.Fatalf("%d bytes: %x, want %x", length, got, want)
			}
		}
	}
}

// A block that is read in parts at once has the digest of one that is written, and an error of a part is one.
func TestDigestRead(t *testing.T) {
	defer func(as bool) { wide = as }(wide)
	random := rand.New(rand.NewPCG(3, 4))
	all := make([]byte, 5*blakePartBytes+blakeUnit)
	for i := range all {
		all[i] = byte(random.Uint32())
	}
	for _, wide = range slices.Compact([]bool{wide, false}) {
		for _, length := range []int{0, 1, blakeUnit, blakePartBytes - 1, blakePartBytes, blakePartBytes + 1, 2 * blakePartBytes, 3*blakePartBytes + 5000, 4*blakePartBytes + blakeUnit, 5 * blakePartBytes, len(all)} {
			for _, threads := range []int{0, 1, 3} {
				got, err := DigestRead(uint64(length), threads, func(p []byte, at uint64) error {
					if copy(p, all[at:length]) < len(p) {
						return io.ErrUnexpectedEOF
					}
					return nil
				})
				if want := DigestBlock(all[:length]); err != nil || got != want {
					t.Fatalf("%d bytes, %d threads, wide=%v: %s, %v, want %s", length, threads, wide, got, err, want)
				}
			}
		}
	}
	for at := range uint64(3) {
		broken := errors.New("a broken disk")
		if _, err := DigestRead(2*blakePartBytes+5, 2, func(_ []byte, from uint64) error {
			if from/blakePartBytes == at {
				return broken
			}
			return nil
		}); !errors.Is(err, broken) {
			t.Errorf("part %d: %v", at, err)
		}
	}
}

// The digests of memory that no cache has, as GPU state is, beside those of memory that one has.
func BenchmarkDigestBlock(b *testing.B) {
	memory := make([]byte, 8*BlockBytes)
	for i := 0; i < len(memory); i += 4096 { // memory that was never written is one page of zeros
		memory[i] = 1
	}
	for _, test := range []struct {
		name  string
		bytes int
	}{{"memory", len(memory)}, {"cache", 16 * blakeUnit}} {
		b.Run(test.name, func(b *testing.B) {
			b.SetBytes(int64(len(memory)))
			for b.Loop() {
				h := NewBlockHash()
				for range len(memory) / test.bytes {
					h.Write(memory[:test.bytes])
				}
			}
		})
	}
}

// Blocks have the digests that BLAKE3 has by the values of their parts, as a GPU computes them. Parts that cannot be all, or
// the only one of a block, tell nothing.
func TestDigestsOfParts(t *testing.T) {
	const part, units = 1 << 20, 1 << 20 / blakeUnit
	random := rand.New(rand.NewPCG(5, 6))
	all := make([]byte, BlockBytes+6*part)
	for i := range all {
		all[i] = byte(random.Uint32())
	}
	for _, parts := range []int{2, 3, 6, 31, 64, 66, 70} {
		var values []byte
		for i := range parts {
			b := &blake{first: uint64(i%64) * units}
			b.Write(all[i*part : (i+1)*part])
			b.add(&b.last)
			for _, word := range b.subtrees[6] {
				values = binary.LittleEndian.AppendUint32(values, word)
			}
		}
		var want []string
		for block := range slices.Chunk(all[:parts*part], BlockBytes) {
			want = append(want, DigestBlock(block))
		}
		if got := DigestsOfParts(uint64(parts*part), values); !slices.Equal(got, want) {
			t.Errorf("%d parts: %v, want %v", parts, got, want)
		}
		for _, bytes := range []int{0, parts*part - 1, (parts - 1) * part, (parts + 1) * part} {
			if got := DigestsOfParts(uint64(bytes), values); got != nil {
				t.Errorf("%d bytes of %d parts: %v", bytes, parts, got)
			}
		}
	}
	if got := DigestsOfParts(part, make([]byte, 32)); got != nil {
		t.Errorf("a block of one part: %v", got)
	}
	if got := DigestsOfParts(0, nil); got != nil {
		t.Errorf("no block: %v", got)
	}
}
