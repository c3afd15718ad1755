// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/mmapfile"
)

// An image that is mapped has the same bytes as one that is written, wherever the pieces are. Much
// zero memory in a piece becomes holes in either.
func TestPagesFile(t *testing.T) {
	const head, full, sparse = 3, 700, 300 // pages
	want := make([]byte, (head+full+sparse)*pageBytes)
	var pieces []Piece
	for i := range head + full + sparse {
		if i >= head+full && i%10 != 0 || i%50 == 7 {
			continue
		}
		copy(want[i*pageBytes:], bytes.Repeat([]byte{byte(i%250 + 1)}, pageBytes))
	}
	for at := uint64(0); at < uint64(len(want)); at += 100 * pageBytes {
		n := min(100*pageBytes, uint64(len(want))-at)
		pieces = append(pieces, Piece{at, n, at})
	}
	for _, mapped := range []bool{false, true} {
		f, err := os.Create(filepath.Join(t.TempDir(), "pages"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		to, err := newPagesFile(f, uint64(len(want)), mapped)
		if err != nil {
			t.Fatal(err)
		}
		if mapped != (to.mem != nil) {
			t.Errorf("it is mapped: %t, want %t", to.mem != nil, mapped)
		}
		err = eachChunk(pieces, func(p Piece, buf []byte) error {
			copy(buf, want[p.Start:])
			return to.write(buf, p.Offset)
		})
		if err != nil {
			t.Fatal(err)
		}
		to.close()
		to.close()
		got, err := os.ReadFile(f.Name())
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("mapped: %t: it has other bytes than were written, or %v", mapped, err)
		}
		// In a hundred pages of the sparse part ten have data.
		if hole, err := unix.Seek(int(f.Fd()), int64(head+full+101)*pageBytes, unix.SEEK_DATA); err != nil || hole <= int64(head+full+101)*pageBytes {
			t.Errorf("mapped: %t: there is no hole at the zeros: data at %d, %v", mapped, hole, err)
		}
	}
}

// A file in memory that gets no more memory is an error, and does not end the process.
func TestPagesFileFull(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("gpuckpt-test", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("a tmpfs cannot be mounted: %v", err)
	}
	defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
	f, err := os.Create(filepath.Join(dir, "pages"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if !mmapfile.InMemory(f) {
		t.Error("a file of a tmpfs is not in memory")
	}
	to, err := newPagesFile(f, 1<<20, true)
	if err != nil {
		t.Fatal(err)
	}
	defer to.close()
	if err := to.write(bytes.Repeat([]byte{1}, 1<<20), 0); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("writing too much answers %v, want %v", err, unix.ENOSPC)
	}
}
