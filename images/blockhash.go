// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"encoding/hex"

	"github.com/zeebo/xxh3"
)

// BlockHash computes DigestBlock of a block that comes in parts.
type BlockHash struct{ h *xxh3.Hasher }

// NewBlockHash returns the hash of an empty block.
func NewBlockHash() *BlockHash { return &BlockHash{xxh3.New()} }

// Write adds the next part of the block.
func (b *BlockHash) Write(part []byte) { _, _ = b.h.Write(part) } // it never fails

// Digest returns the digest of all parts so far.
func (b *BlockHash) Digest() string {
	sum := b.h.Sum128().Bytes()
	return digestPrefix + hex.EncodeToString(sum[:])
}

// ZeroBlockDigest is the digest of a whole block of zeros.
const ZeroBlockDigest = digestPrefix + "8c5a2179ae9f1c910939aaa27d431ff2"
