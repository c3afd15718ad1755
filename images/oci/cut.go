// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bytes"
	"fmt"
	"io"

	"github.com/gpuckpt/gpuckpt/images"
)

const (
	// blockBytes is the unit in which zeros are found: it divides the offset of every piece.
	blockBytes = images.PieceAlign
	// gapBytes is how long a run of zeros must be to end a piece, or an eighth of the cut if that is more: each piece is
	// a blob, a file to open and a mapping of the restored process.
	gapBytes = 16 << 20
	// minLayerBytes is the smallest cut; a multiple of images.BlockBytes.
	minLayerBytes = 64 << 20
)

// Most pieces that GPU state and memory are cut into: blobs are a file and a mapping each, and of layers an overlay
// stacks 500 at most.
const mostBlobs, mostLayers = 256, 128

// chooseLayerBytes returns the size of the pieces that GPU state and memory are cut into. They are so small that one
// changed byte sends little again and many processors have as much to do, and so large that there are few.
func chooseLayerBytes(state, most uint64) uint64 {
	size := uint64(minLayerBytes)
	for state > size*most {
		size *= 2
	}
	return size
}

type span struct{ from, to uint64 }

// runs finds what of a range, a cut, has to be stored; from is a multiple of blockBytes. It reads little of
// a block that is not zero, and all of one that is.
func runs(r *images.AreaReader, from, to uint64) ([]span, error) {
	var found []span
	data := r.NextData(from) // before it there are holes only
	gap := max(gapBytes, (to-from)/8)
	buf, zeros := make([]byte, 256<<10), make([]byte, 256<<10)
	for at := from; at < to; at += blockBytes {
		end := min(at+blockBytes, to)
		if data < at {
			data = r.NextData(at)
		}
		if data >= end {
			continue
		}
		empty, err := allZero(r, at, end, buf, zeros)
		if err != nil {
			return nil, err
		}
		switch last := len(found) - 1; {
		case empty:
		case last >= 0 && at-found[last].to < gap:
			found[last].to = end
		default:
			found = append(found, span{at, end})
		}
	}
	return found, nil
}

// toEnd returns runs of which the last ends where the file does.
func toEnd(found []span, end uint64) []span {
	if n := len(found); n > 0 && found[n-1].to == end {
		return found
	}
	return append(found, span{(end - 1) / blockBytes * blockBytes, end})
}

func allZero(r io.ReaderAt, from, to uint64, buf, zeros []byte) (bool, error) {
	for part := uint64(4 << 10); from < to; part = uint64(len(buf)) {
		b := buf[:min(part, to-from)]
		if _, err := r.ReadAt(b, int64(from)); err != nil {
			return false, fmt.Errorf("look for zeros: %w", err)
		}
		if !bytes.Equal(b, zeros[:len(b)]) {
			return false, nil
		}
		from += uint64(len(b))
	}
	return true, nil
}
