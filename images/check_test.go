// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// sparse returns an area in a file of so many blocks with one byte that is not zero, in the middle of
// the last but one.
func sparse(t *testing.T, blocks int) (a Area, path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "gpu-1-0")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(int64(blocks) * BlockBytes); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{1}, int64(blocks-2)*BlockBytes+BlockBytes/2); err != nil {
		t.Fatal(err)
	}
	block := make([]byte, BlockBytes)
	block[BlockBytes/2] = 1
	digests := slices.Repeat([]string{ZeroBlockDigest}, blocks)
	digests[blocks-2] = DigestBlock(block)
	return Area{File: "gpu-1-0", Bytes: uint64(blocks) * BlockBytes, Digests: digests}.In(path), path
}

// Holes count as the zeros that they are, and nobody reads them: 1 TiB would take minutes.
func TestCheckHoles(t *testing.T) {
	a, path := sparse(t, 1<<40/BlockBytes)
	if err := Check(t.Context(), []Area{a}, 0, nil); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const block = 77
	if _, err := f.WriteAt([]byte{1}, block*BlockBytes+12345); err != nil {
		t.Fatal(err)
	}
	var wrong *BlockError
	if err := Check(t.Context(), []Area{a}, 0, nil); !errors.As(err, &wrong) || wrong.Block != block {
		t.Errorf("a byte in a hole: %v", err)
	}
	if err := f.Truncate(100 * BlockBytes); err != nil {
		t.Fatal(err)
	}
	if err := Check(t.Context(), []Area{a}, 0, nil); !errors.Is(err, ErrDamaged) {
		t.Errorf("a file that ends in a hole: %v", err)
	}
}

// A hole is not taken for what it should have held.
func TestCheckHoleInPlaceOfData(t *testing.T) {
	a, path := sparse(t, 4)
	if err := os.Truncate(path, 0); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 4*BlockBytes); err != nil {
		t.Fatal(err)
	}
	var wrong *BlockError
	if err := Check(t.Context(), []Area{a}, 0, nil); !errors.As(err, &wrong) || wrong.Block != 2 || wrong.Got != ZeroBlockDigest {
		t.Errorf("got %v", err)
	}
}
