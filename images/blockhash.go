// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"encoding/hex"

	"github.com/zeebo/xxh3"
)

// BlockHash is DigestBlock for a block that comes in parts.
type BlockHash struct{ h *xxh3.Hasher }

// NewBlockHash begins a block.
func NewBlockHash() *BlockHash { return &BlockHash{xxh3.New()} }

// Write adds a part of the block.
func (b *BlockHash) Write(part []byte) { _, _ = b.h.Write(part) } // it never fails

// Digest gives the digest of all that was written.
func (b *BlockHash) Digest() string {
	sum := b.h.Sum128().Bytes()
	return digestPrefix + hex.EncodeToString(sum[:])
}

// ZeroBlockDigest is the digest of a whole block of zeros.
func ZeroBlockDigest() string {
	h, zeros := NewBlockHash(), make([]byte, 1<<20)
	for range BlockBytes / len(zeros) {
		h.Write(zeros)
	}
	return h.Digest()
}
