// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
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

// A file on a tmpfs is digested where it is, except for a block with holes, which a mapping would
// fill: the file takes no more memory than before.
func TestCheckInMemory(t *testing.T) {
	dir, err := os.MkdirTemp("/dev/shm", "gpuckpt-images-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "gpu-1-0")
	const size, hole = 3*BlockBytes + 4096, BlockBytes + BlockBytes/2
	content := bytes.Repeat([]byte("GPU state, "), size/11+1)[:size]
	clear(content[hole:][:4<<20])
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	write := func(from, to int) {
		if _, err := f.WriteAt(content[from:to], int64(from)); err != nil {
			t.Fatal(err)
		}
	}
	write(0, hole)
	write(hole+4<<20, size)
	blocks := func() int64 {
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			t.Fatal(err)
		}
		return st.Blocks
	}
	a := Area{File: "gpu-1-0", Bytes: size}.In(path)
	for at := 0; at < size; at += BlockBytes {
		a.Digests = append(a.Digests, DigestBlock(content[at:min(at+BlockBytes, size)]))
	}
	before := blocks()
	if before*512 >= size {
		t.Fatalf("the file has no hole: %d blocks", before)
	}
	r := a.Open(t.Context())
	var viewed []bool
	for i := range a.Digests {
		viewed = append(viewed, r.view(uint64(i)*BlockBytes, min(BlockBytes, size-uint64(i)*BlockBytes)) != nil)
	}
	r.Close()
	if !slices.Equal(viewed, []bool{true, false, true, true}) {
		t.Errorf("in memory without holes: %v", viewed)
	}
	if err := Check(t.Context(), []Area{a}, 0, nil); err != nil {
		t.Error(err)
	}
	if after := blocks(); after != before {
		t.Errorf("the file had %d blocks, and has %d", before, after)
	}
	content[2*BlockBytes+7] ^= 1
	write(2*BlockBytes, 2*BlockBytes+4096)
	var wrong *BlockError
	if err := Check(t.Context(), []Area{a}, 0, nil); !errors.As(err, &wrong) || wrong.Block != 2 {
		t.Errorf("a changed byte: %v", err)
	}
}

// A file that is cut short while it is digested where it is ends the check, not the process.
func TestCheckInMemoryCutShort(t *testing.T) {
	dir, err := os.MkdirTemp("/dev/shm", "gpuckpt-images-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "gpu-1-0")
	for _, like := range []string{ZeroBlockDigest, zeroBlockXXH} {
		if err := os.WriteFile(path, make([]byte, 4<<20), 0o600); err != nil {
			t.Fatal(err)
		}
		a := Area{File: "gpu-1-0", Bytes: 4 << 20, Digests: []string{like}}.In(path)
		r := a.Open(t.Context())
		defer r.Close()
		view := r.view(0, 4<<20)
		if view == nil {
			t.Fatal("the file is not in memory")
		}
		if err := os.Truncate(path, 1<<20); err != nil {
			t.Fatal(err)
		}
		h := NewBlockHashLike(like)
		hash := func(b []byte) error {
			h.Write(b)
			return nil
		}
		if err := useView(view, hash); !errors.Is(err, ErrDamaged) {
			t.Errorf("got %v", err)
		}
	}
}
