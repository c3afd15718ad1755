// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"encoding/binary"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/zeebo/xxh3"
	"golang.org/x/sync/errgroup"
)

// BlockBytes is the size of the blocks that are digested, counted from the begin of
// the area's range. The last block may be shorter.
const BlockBytes = 64 << 20

// Blocks returns how many blocks so many bytes have, any number.
func Blocks(bytes uint64) uint64 { return bytes/BlockBytes + min(bytes%BlockBytes, 1) }

// DigestBlock returns the digest of a block, "blake3:" and 64 hexadecimal digits. It is
// BLAKE3 with 256 bits and no key: whoever signs the digests signs the blocks.
func DigestBlock(b []byte) string {
	h := NewBlockHash()
	h.Write(b)
	return h.Digest()
}

// DigestRead returns the digest of a block of so many bytes that read returns parts of, by where they begin.
// It reads on so many threads at once. An error is read's.
func DigestRead(bytes uint64, threads int, read func(p []byte, at uint64) error) (string, error) {
	whole := new(blake)
	values := make([][8]uint32, (max(bytes, 1)-1)/blakePartBytes) // the last part may be the root
	var group errgroup.Group
	group.SetLimit(max(threads, 1))
	for i := range values {
		group.Go(func() error {
			part := newPart(uint64(i))
			err := readInto(part, uint64(i)*blakePartBytes, blakePartBytes, read)
			values[i] = part.value()
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return "", err
	}
	for _, value := range values {
		whole.addPart(value)
	}
	from := uint64(len(values)) * blakePartBytes
	if err := readInto(whole, from, bytes-from, read); err != nil {
		return "", err
	}
	return blakeDigest(whole.Sum()), nil
}

// readBytes is what is read at once, in bytes: a processor's own cache has it.
const readBytes = 1 << 20

var readBuffers = sync.Pool{New: func() any { return new([readBytes]byte) }}

// DigestsOfParts returns the digests of blocks with so many bytes in all, of the chaining values of each MiB in its block,
// in order and 32 bytes each: a GPU has computed them. It is nil where these cannot be all: each block has two parts or
// more.
func DigestsOfParts(bytes uint64, values []byte) (digests []string) {
	const part, value = 1 << 20, 32
	if bytes%part != 0 || uint64(len(values)) != bytes/part*value || bytes%BlockBytes == part {
		return nil
	}
	for all := range slices.Chunk(values, BlockBytes/part*value) {
		var parts [][8]uint32
		for one := range slices.Chunk(all, value) {
			var words [8]uint32
			for i := range words {
				words[i] = binary.LittleEndian.Uint32(one[4*i:])
			}
			parts = append(parts, words)
		}
		digests = append(digests, blakeDigest(rootOf(parts)))
	}
	return digests
}

// readInto has a hash digest so many bytes from a place on.
func readInto(b *blake, from, bytes uint64, read func(p []byte, at uint64) error) error {
	space := readBuffers.Get().(*[readBytes]byte)
	defer readBuffers.Put(space)
	buf := space[:min(readBytes, bytes)]
	for ; bytes > 0; bytes -= uint64(len(buf)) {
		buf = buf[:min(uint64(len(buf)), bytes)]
		if err := read(buf, from); err != nil {
			return err
		}
		b.Write(buf)
		from += uint64(len(buf))
	}
	return nil
}

// BlockHash computes the digest of a block that comes in parts.
type BlockHash struct {
	blake *blake
	xxh   *xxh3.Hasher // of schema version 1: one of the two is set
}

// MarkBlock returns a digest that tells blocks apart as fast as memory is read, XXH3. It proves
// nothing to anybody else.
func MarkBlock(b []byte) string {
	h := NewBlockMark()
	h.Write(b)
	return h.Digest()
}

// NewBlockMark returns the hash of an empty block, for MarkBlock's digest.
func NewBlockMark() *BlockHash { return &BlockHash{xxh: xxh3.New()} }

// NewBlockHash returns the hash of an empty block, for DigestBlock's digest.
func NewBlockHash() *BlockHash { return &BlockHash{blake: new(blake)} }

// NewBlockHashLike returns the hash of an empty block, for a digest of the same kind as
// like: a checkpoint of schema version 1 has XXH3's, which find damage and no forgery.
func NewBlockHashLike(like string) *BlockHash {
	if strings.HasPrefix(like, xxhPrefix) {
		return NewBlockMark()
	}
	return NewBlockHash()
}

// Write adds the next part of the block.
func (b *BlockHash) Write(part []byte) {
	if b.xxh != nil {
		_, _ = b.xxh.Write(part) // never fails
	} else {
		b.blake.Write(part)
	}
}

// Digest returns the digest of all parts so far.
func (b *BlockHash) Digest() string {
	if b.xxh != nil {
		return fmt.Sprintf("%s%x", xxhPrefix, b.xxh.Sum128().Bytes())
	}
	return blakeDigest(b.blake.Sum())
}

func blakeDigest(sum [32]byte) string { return fmt.Sprintf("%s%x", blakePrefix, sum) }

const (
	blakePrefix = "blake3:"
	xxhPrefix   = "xxh3-128:"
)

// ZeroBlockDigest is the digest of a whole block of zeros.
const ZeroBlockDigest = blakePrefix + "ea7b156fc9a810c181984f9e2da433feeeb2bf88ffa4d1f0dc1a92154b5bdc8b"

// zeroBlockXXH is the same in schema version 1.
const zeroBlockXXH = xxhPrefix + "8c5a2179ae9f1c910939aaa27d431ff2"

// IsZeroBlock reports whether a digest is that of a whole block of zeros.
func IsZeroBlock(digest string) bool { return digest == ZeroBlockDigest || digest == zeroBlockXXH }

// ZeroBlockLike returns the digest of a whole block of zeros that is of the same kind as like.
func ZeroBlockLike(like string) string {
	if strings.HasPrefix(like, xxhPrefix) {
		return zeroBlockXXH
	}
	return ZeroBlockDigest
}

// digestForms match the digests of blocks, by schema version. Here and elsewhere what is matched is made when it is
// asked for: an idle shim asks for none of it.
var digestForms = sync.OnceValue(func() map[int]*regexp.Regexp {
	blake := regexp.MustCompile(`^blake3:[0-9a-f]{64}$`)
	return map[int]*regexp.Regexp{1: regexp.MustCompile(`^xxh3-128:[0-9a-f]{32}$`), 2: blake, 3: blake}
})

// ProvesGPUState reports whether the metadata proves the bytes of GPU state to whoever trusts
// it. The digests of schema version 1 do not.
func (m *Metadata) ProvesGPUState() bool {
	return m.SchemaVersion > 1 || !slices.ContainsFunc(m.Processes, func(p Process) bool { return len(p.Areas) > 0 })
}
